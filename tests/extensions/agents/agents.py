"""Harnesses and addresses of the policy, for tests: what a user's own code would be."""

from __future__ import annotations

import json
from contextlib import contextmanager

import httpx2

from posttrain.data.chat import terminal_token_ids
from posttrain.extensions.agents.calls import Policy
from posttrain.extensions.agents.proxy import CaptureProxy, engine_sample, sampled_by
from posttrain.rollouts.engines import create_engine
from posttrain.types import Sampling
from tests.conftest import CHAT_TEMPLATE

ASK = [{"role": "user", "content": "What is the sum of two numbers?"}]
# As `CHAT_TEMPLATE`, with calls and results of tools in the wire format of Qwen.
TOOL_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{{- message['content'] or '' }}"
    "{%- for call in message.get('tool_calls') or [] %}"
    "{{- '\n<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
assert CHAT_TEMPLATE != TOOL_TEMPLATE


@contextmanager
def serving(model, tokenizer, sample=None, engine="native", **options):
    """The policy behind an address; ``options`` are of `Policy`."""
    made = create_engine(engine, model, pad_token_id=tokenizer.pad_token_id)
    made.tokenizer = tokenizer
    settings = {"max_new_tokens": 12, "stop_token_ids": terminal_token_ids(tokenizer)} | options.pop("sampling", {})
    policy = Policy(tokenizer, Sampling(**settings), **{"context": 512, "vocabulary": len(tokenizer)} | options)
    per_request = made.capabilities.per_request_sampling
    with sampled_by(CaptureProxy(policy), sample or engine_sample(made), per_request=per_request) as proxy:
        yield proxy


def post(proxy, session, body, path="chat/completions", headers=None, **options):
    """One call as a bare client makes it."""
    sent = {"Authorization": f"Bearer {session.key}"} | (headers or {})
    content = body if isinstance(body, bytes) else json.dumps({"model": "policy"} | body).encode()
    return httpx2.post(f"{proxy.url}/{path}", content=content, headers=sent, timeout=60, **options)


def say(base_url, api_key, messages, **more):
    """The content of one answer."""
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": "policy", "messages": messages} | more
    reply = httpx2.post(
        f"{base_url}/chat/completions", json=body, headers=headers, timeout=300
    )  # vLLM compiles at its first call.
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def forking(task, base_url, api_key):
    """Two turns, and three forks of the first one."""
    messages = list(task["prompt"])
    messages.append({"role": "assistant", "content": say(base_url, api_key, messages)})
    last = say(base_url, api_key, [*messages, {"role": "user", "content": "And now?"}])
    for number in range(3):
        say(base_url, api_key, [*messages, {"role": "user", "content": f"Fork {number}"}])
    return len(last) / 10


def single(task, base_url, api_key):
    """One call."""
    return len(say(base_url, api_key, list(task["prompt"]))) / 10


def sometimes(task, base_url, api_key):
    """Of rows 0 to 3: raises, never calls, returns nothing, works."""
    if task["n"] == 0:
        raise ValueError("this agent is broken")
    if task["n"] == 1:
        return 1.0
    length = single(task, base_url, api_key)
    return None if task["n"] == 2 else length


async def asynchronous(task, base_url, api_key, model, seed):
    """One call on an event loop; names the model and the seed."""
    async with httpx2.AsyncClient(timeout=60) as client:
        body = {"model": model, "messages": list(task["prompt"])}
        reply = await client.post(
            f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}
        )
    return {"reward": float(len(reply.json()["choices"])), "seed": seed}
