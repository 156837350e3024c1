"""Reading answers back: every format returns what was rendered, and nothing a model writes makes it raise."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from posttrain.data.responses import (
    FORMATS,
    Bare,
    add_response_schema,
    harmony,
    parse_response,
    typed_arguments,
)
from posttrain.data.templates import training_template
from posttrain.errors import ModelError
from tests.data.test_templates import BY_FILE, TOKENS
from tests.wordings import raises

# Two formats without a training template here: calls as XML after a think block the prompt opens, and as Python.
XML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ ('\n\n' if loop.first and m.content else '' if loop.first else '\n') }}"
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PYTHON = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.thinking %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ c.function.name + '(' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ (', ' if not loop.first else '') + k + '=' + (\"'\" + v + \"'\" if v is string else v | string) }}{% endfor %}"
    "{{ ')' + (']<|tool_call_end|>' if loop.last else '') }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHIPPED = {"xml": XML, "python": PYTHON}
FORMAT_OF = {
    "qwen2_5": "qwen_json",
    "qwen3": "qwen_json",
    "qwen3_instruct_2507": "qwen_json",
    "qwen3_5": "qwen_xml",
    "nemotron3": "qwen_xml",
    "llama3_1": "llama_json",
    "glm4moe": "glm",
    "deepseekv3": "deepseek",
    "gptoss": "harmony",
    "xml": "qwen_xml",
    "python": "pythonic",
}
NAMES = sorted(FORMAT_OF)
REASONING = {
    "qwen3": "reasoning_content",
    "qwen3_5": "reasoning_content",
    "nemotron3": "reasoning_content",
    "glm4moe": "reasoning_content",
    "deepseekv3": "reasoning_content",
    "xml": "reasoning_content",
    "gptoss": "thinking",
    "python": "thinking",
}
ONE_CALL_WITHOUT_TEXT = {"llama3_1", "gptoss"}

ASK = {"role": "user", "content": "Hi?"}


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name: str, **kinds) -> dict:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [schema("find", zip="string", n="integer", deep="boolean", filters="array", box="object"), schema("stop")]
FIND = call("find", zip="75001", n=2)
RICH = call("find", zip='two "ü"\nlines', n=-1, deep=False, filters=["a", 1, True], box={"a": {"b": 0.5}})


def messages_of(name: str) -> list[dict]:
    found = [{"content": "Yes, of course."}, {"content": "", "tool_calls": [FIND]}]
    found += [{"content": "", "tool_calls": [call("stop")]}, {"content": "", "tool_calls": [RICH]}]
    if name in REASONING:
        found.append({"content": "Yes.", REASONING[name]: "because\nof this"})
        found.append({"content": "", REASONING[name]: "because", "tool_calls": [FIND]})
    if name not in ONE_CALL_WITHOUT_TEXT:
        found.append({"content": "I look it up.", "tool_calls": [FIND]})
        found.append({"content": "", "tool_calls": [FIND, call("stop"), RICH]})
    return [{"role": "assistant", **message} for message in found]


CASES = [(name, index) for name in NAMES for index in range(len(messages_of(name)))]


@pytest.fixture(scope="module")
def tokenizers(_tokenizer_folder):
    """A tokenizer of each format, ready to parse."""
    built = {}
    for name in NAMES:
        tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder)
        tokens = TOKENS.get(name, ["", "<|im_end|>", "<|im_start|>"])
        tokenizer.add_tokens([token for token in tokens if token], special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = tokens[0] or None, tokens[1]
        tokenizer.chat_template = SHIPPED.get(name) or training_template(BY_FILE[name])
        built[name] = add_response_schema(tokenizer)
    return built


def written(tokenizer, message: dict) -> tuple[list[int], list[int]]:
    """Prompt ids, and ids of what the model writes after it."""
    head = tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template([ASK, message], tokenize=False)
    if not text.startswith(head):  # The prompt opens a think block; this answer has none.
        head = head.removesuffix("<think>\n")
    assert text.startswith(head)
    return [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (head, text[len(head) :])]


def test_every_format_has_a_tokenizer_here(tokenizers):
    assert set(FORMAT_OF.values()) == set(FORMATS)
    found = {name: tokenizer.posttrain_response_format for name, tokenizer in tokenizers.items()}
    assert found == FORMAT_OF


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_rendered_turn_reads_back_as_the_message_it_was(name, index, tokenizers):
    message = messages_of(name)[index]
    prefix, ids = written(tokenizers[name], message)
    assert parse_response(tokenizers[name], ids, prefix=prefix, tools=TOOLS) == message


@pytest.mark.parametrize(("name", "index"), CASES)
def test_no_truncation_makes_it_raise_or_invents_a_call(name, index, tokenizers):
    tokenizer, message = tokenizers[name], messages_of(name)[index]
    prefix, ids = written(tokenizer, message)
    for length in range(len(ids)):
        for before in (prefix, None):
            read = parse_response(tokenizer, ids[:length], prefix=before, tools=TOOLS)
            assert read["role"] == "assistant"
            assert isinstance(read["content"], str)
            for made in read.get("tool_calls", ()):
                assert made in message.get("tool_calls", ())


@pytest.mark.parametrize("name", NAMES)
def test_a_malformed_call_becomes_plain_text_with_the_reason(name, tokenizers):
    tokenizer = tokenizers[name]
    _, ids = written(tokenizer, {"role": "assistant", "content": "", "tool_calls": [FIND]})
    text = tokenizer.decode(ids)
    broken = (
        text.replace('"zip"', '"zip')
        .replace("<parameter=zip>", "<parameter")
        .replace("zip='", "zip==")
        .replace("</arg_key>", "")
    )
    assert broken != text
    ids = tokenizer(broken, add_special_tokens=False)["input_ids"]
    read = parse_response(tokenizer, ids)
    assert read["content"] == tokenizer.decode(ids, skip_special_tokens=True)
    assert read["parse_error"]
    assert "tool_calls" not in read


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_nothing_a_model_may_write_makes_it_raise(data, tokenizers):
    pieces = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[f(",
        ")]",
        "{",
        '"name"',
        ":",
        "<function=f>",
        "</function>",
    ]
    pieces += [
        "<|channel|>",
        "<|message|>",
        "analysis",
        " to=functions.f",
        "<arg_key>",
        "<|tool_call_start|>",
        "\n",
        "x",
        "[",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=14)))
    tokenizer = tokenizers[data.draw(st.sampled_from(NAMES))]
    read = parse_response(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], tools=TOOLS)
    assert isinstance(read["content"], str)


def parsed(tokenizer, text: str, **kwargs) -> dict:
    return parse_response(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"], **kwargs)


def test_reasoning_after_a_prompt_that_opened_the_block_is_no_content(tokenizers):
    said = "because\n</think>\n\nYes.<|im_end|>"
    want = {"role": "assistant", "content": "Yes.", "reasoning_content": "because"}
    assert parsed(tokenizers["xml"], said, prefix="assistant\n<think>\n") == want
    assert parsed(tokenizers["xml"], said) == want
    cut = parsed(tokenizers["xml"], "because it", prefix="assistant\n<think>\n")
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "because it"}
    assert parsed(tokenizers["xml"], "because it")["content"] == "because it"
    assert parsed(tokenizers["xml"], "<think>\nbecause it") == cut
    closed = parsed(tokenizers["xml"], "Yes, it", prefix="assistant\n<think>\n\n</think>\n\n")
    assert closed == {"role": "assistant", "content": "Yes, it"}


def test_bare_arguments_are_typed_by_the_tools_schema(tokenizers):
    text = "<tool_call>\n<function=find>\n<parameter=zip>\n75001\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    typed = parsed(tokenizers["xml"], text, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]
    assert typed == {"zip": "75001", "n": 3}
    guessed = parsed(tokenizers["xml"], text)["tool_calls"][0]["function"]["arguments"]
    assert guessed == {"zip": 75001, "n": 3}
    assert type(typed["zip"]) is str


def test_tools_may_be_functions(tokenizers):
    def find(zip: str):
        """Find it.

        Args:
            zip: Where.
        """

    text = '<tool_call>\n{"name": "find", "arguments": {"zip": 75001}}\n</tool_call>'
    assert parsed(tokenizers["qwen2_5"], text, tools=[find])["tool_calls"] == [call("find", zip="75001")]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7"),
        ("seven", {"type": "integer"}, "seven"),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2]", None, [1, 2]),
        ("plain", None, "plain"),
    ],
)
def test_bare_text_takes_the_type_asked_for(text, schema, value):
    found = typed_arguments("f", {"x": Bare(text)}, {"f": {"x": schema}} if schema else {})["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "f", "arguments": null}', [call("f")]),
        ('{"name": "f"}', [call("f")]),
        ('{"name": 3, "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ('{"name": "f", "arguments": "x"}', None),
        ("[1]", None),
    ],
)
def test_calls_are_validated(body, calls, tokenizers):
    read = parsed(tokenizers["qwen2_5"], f"<tool_call>\n{body}\n</tool_call><|im_end|>")
    assert read.get("tool_calls") == calls
    assert ("parse_error" in read) == (calls is None)


def test_one_end_token_is_stripped_and_the_texts_own_spaces_stay(tokenizers):
    assert parsed(tokenizers["qwen2_5"], " a  b \n<|im_end|>\n")["content"] == " a  b \n"
    assert parsed(tokenizers["qwen2_5"], "a<|im_end|><|im_end|>")["content"] == "a<|im_end|>"
    assert parse_response(tokenizers["qwen2_5"], [])["content"] == ""


def test_gpt_oss_reads_a_recipient_after_the_channel_too(tokenizers):
    text = '<|channel|>commentary to=functions.find json<|message|>{"n": 2}<|call|>'
    assert parsed(tokenizers["gptoss"], text)["tool_calls"] == [call("find", n=2)]


def test_pythonic_false_stays_false(tokenizers):
    text = "<|tool_call_start|>[find(deep=False, filters=[true, null])]<|tool_call_end|>"
    assert parsed(tokenizers["python"], text)["tool_calls"] == [call("find", deep=False, filters=[True, None])]


def test_a_tokenizer_without_a_format_gives_plain_content(tiny_tokenizer):
    text = "<tool_call>x</tool_call><|im_end|>"
    assert parsed(tiny_tokenizer, text) == {"role": "assistant", "content": "<tool_call>x</tool_call>"}
    with raises(ModelError):
        add_response_schema(tiny_tokenizer)


def test_an_unknown_format_of_calls_is_refused_with_the_known_ones(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    with raises(ModelError, "qwen_json", "qwen_xml"):
        add_response_schema(tiny_tokenizer)


def test_a_processors_tokenizer_is_marked(tokenizers):
    class Processor:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer
            self.chat_template = tokenizer.chat_template

    processor = Processor(tokenizers["qwen3"])
    del processor.tokenizer.posttrain_response_format
    assert add_response_schema(processor) is processor
    assert processor.tokenizer.posttrain_response_format == "qwen_json"
    assert parsed(processor.tokenizer, "<think>\na\n</think>\n\nb")["reasoning_content"] == "a"


def test_a_response_template_the_checkpoint_ships_is_used_and_survives_failure(tiny_tokenizer):
    tiny_tokenizer.response_template = {"made": "up"}
    assert add_response_schema(tiny_tokenizer) is tiny_tokenizer
    seen = {}

    def own(text, prefix, tools):
        seen.update(text=text, prefix=prefix)
        return {"content": "ok<|im_end|>", "tool_calls": [{"name": "f"}]}

    tiny_tokenizer.parse_response = own
    read = parsed(tiny_tokenizer, "one<|im_end|>", prefix="two")
    assert read == {"role": "assistant", "content": "ok", "tool_calls": [call("f")]}
    assert seen == {"text": "one<|im_end|>", "prefix": "two"}
    tiny_tokenizer.parse_response = lambda *args, **kwargs: None
    assert (
        parsed(tiny_tokenizer, "one")["parse_error"]
        == "the tokenizer's response template returned NoneType instead of a message"
    )


def test_a_message_that_never_begins_is_told_at_once():
    """A channel's name of many letters: each shorter one would be tried, with all that follows."""
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="not a message on a channel"):
        harmony("<|channel|>" + "a" * 40_000, opened=False)
    assert time.perf_counter() - begun < 2
