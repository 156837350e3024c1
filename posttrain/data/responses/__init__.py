"""Reading a model's answer back: reasoning, text and tool calls out of token ids."""

from posttrain.data.responses.parse import ParsedMessage, add_response_schema, parse_response, reasoning_policy

__all__ = ["ParsedMessage", "add_response_schema", "parse_response", "reasoning_policy"]
