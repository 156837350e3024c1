"""Sixteen harnesses at once that stream, cancel, retry, hang and are killed: every call has its end, and no token is lost."""

import asyncio
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict

import httpx2
import pytest

from posttrain.extensions.agents.calls import Policy
from posttrain.extensions.agents.harness import Harness, HarnessOptions, HarnessRunner, as_rollouts
from posttrain.extensions.agents.proxy import engine_sample
from posttrain.rollouts.engines import create_engine
from posttrain.types import Sampling
from tests.extensions.agents.agents import ASK

# A command that makes a few calls, and kills itself in the middle of one of them where it is told to.
COMMAND = """
import json, os, random, signal, sys, threading, urllib.request
row = json.load(sys.stdin)
drawn = random.Random(row["n"])
url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
if drawn.random() < 0.6:
    threading.Timer(drawn.random() * 0.4, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
for turn in range(4):
    body = json.dumps({"model": "policy", "messages": row["prompt"] + [{"role": "user", "content": str(turn)}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, {"Authorization": "Bearer " + key}), timeout=60).read()
print(1)
"""


class Chaos:
    """An asynchronous harness that does one of everything; remembers the answers that it read to their end."""

    def __init__(self):
        self.read, self.lock = Counter(), threading.Lock()

    async def __call__(self, task, base_url, api_key):
        drawn, messages = random.Random(task["n"]), list(task["prompt"])
        async with httpx2.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {api_key}"}) as client:
            for turn in range(drawn.randrange(1, 6)):
                body = {"model": "policy", "messages": messages, "n": drawn.choice([1, 1, 2])}
                kind = drawn.choice(["plain", "plain", "stream", "cut", "cancel", "retry", "beside", "bad"])
                said = await getattr(self, kind)(client, f"{base_url}/chat/completions", body, drawn)
                if said is not None and drawn.random() < 0.7:
                    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"turn {turn}"}]
                elif drawn.random() < 0.3:
                    messages = messages[:1]
        if drawn.random() < 0.1:
            raise ValueError("an agent that breaks")
        if drawn.random() < 0.03:
            await asyncio.sleep(9)
        return drawn.random()

    def note(self, key):
        with self.lock:
            self.read[key] += 1

    async def plain(self, client, url, body, drawn, headers=None):
        reply = await client.post(url, json=body, headers=headers)
        reply.raise_for_status()
        self.note("whole")
        return reply.json()["choices"][0]["message"]["content"]

    async def retry(self, client, url, body, drawn):
        first = await self.plain(client, url, body, drawn)
        assert first == await self.plain(client, url, body, drawn, {"x-stainless-retry-count": "1"})
        return first

    async def beside(self, client, url, body, drawn):
        return (await asyncio.gather(*(self.plain(client, url, body, drawn) for _ in range(3))))[0]

    async def bad(self, client, url, body, drawn):
        reply = await client.post(url, json=body | drawn.choice([{"model": "x"}, {"temperature": 0}, {"what": 1}]))
        assert reply.status_code in (400, 404)
        self.note("bad")

    async def stream(self, client, url, body, drawn):
        async with client.stream("POST", url, json=body | {"stream": True}) as reply:
            lines = [line async for line in reply.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        self.note("whole")

    async def cut(self, client, url, body, drawn):
        async with client.stream("POST", url, json=body | {"stream": True}) as reply:
            async for _ in reply.aiter_lines():
                return

    async def cancel(self, client, url, body, drawn):
        call = asyncio.create_task(client.post(url, json=body))
        await asyncio.sleep(drawn.random() * 0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


def soak(model, tokenizer, seconds):
    """Rounds of 16 functions and 4 commands until the time is up.

    Returns:
        Counts over all sessions, and how many episodes ended how.
    """
    engine = create_engine("native", model, pad_token_id=2)
    engine.tokenizer = tokenizer
    policy = Policy(tokenizer, Sampling(12, stop_token_ids=(2,)), context=512, vocabulary=len(tokenizer))
    chaos, number = Chaos(), 0
    options = HarnessOptions(limit=16, timeout=8.0)
    runners = [HarnessRunner(Harness(chaos), options), HarnessRunner(Harness([sys.executable, "-c", COMMAND]), options)]
    totals, ends, sampled = Counter(), Counter(), Counter()
    sample = engine_sample(engine)

    def counted(batches):
        made = sample(batches)
        sampled.update(tokens=sum(len(r.token_ids) for rollouts in made for r in rollouts))
        return made

    threads, limit = threading.active_count(), time.monotonic() + seconds
    while time.monotonic() < limit:
        for runner, size in zip(runners, (24, 4), strict=True):
            rows = [{"prompt": ASK, "n": number + k} for k in range(size)]
            number += size
            episodes = runner.run(rows, [row["n"] for row in rows], policy, counted)
            wait = time.monotonic() + 10
            while any(one.session.counts.open for one in episodes) and time.monotonic() < wait:
                time.sleep(0.01)
            made = as_rollouts(episodes, runner.harness, placeholder=2, leave_out=True)
            for one, rollout in zip(episodes, made.rollouts, strict=True):
                check(one, rollout)
                totals.update(asdict(one.session.counts))
                ends[(one.error or "fine").split(":")[0]] += 1
    read, strays = chaos.read, sum(runner.proxy.strays for runner in runners)
    left = [key for runner in runners for key in runner.proxy.sessions]
    for runner in runners:
        runner.close()
    assert not left and threading.active_count() <= threads + 80, "sessions and threads do not pile up"
    return totals, ends, read, sampled["tokens"], strays


def check(episode, rollout):
    """Every call has one end, and what was answered is what is trained."""
    session, counts = episode.session, episode.session.counts
    assert counts.open == 0, (episode.error, counts)
    states = Counter(call.state for call in session.calls)
    assert not states["waiting"] and states["answered"] <= counts.answered + counts.retried
    answered = sum(len(r.token_ids) for c in session.calls if c.state == "answered" for r in c.completions)
    trained = sum(sum(branch.episode.tool_mask) for branch in session.branches())
    assert trained == answered <= counts.tokens
    if episode.error is None:
        assert sum(sum(r.tool_mask or [1] * len(r.token_ids)) for r in (rollout, *rollout.branches)) == trained
    else:
        assert not rollout.token_ids


def run_soak(model, tokenizer, seconds):
    totals, ends, read, sampled, strays = soak(model, tokenizer, seconds)
    print(
        f"{seconds} s: calls {dict(totals)}, strays {strays}, episodes {dict(ends)}, read by functions {dict(read)}, sampled {sampled}"
    )
    parts = ("answered", "retried", "cancelled", "refused", "failed")
    assert totals["received"] == sum(totals[name] for name in parts)
    assert read["whole"] <= totals["answered"] + totals["retried"] and read["bad"] <= totals["refused"]
    assert totals["tokens"] <= sampled, "what was sampled for an episode that was gone belongs to none"
    return totals, ends


@pytest.mark.matrix
@pytest.mark.slow
def test_a_short_soak_accounts_for_every_call(tiny_model, tiny_tokenizer):
    totals, ends = run_soak(tiny_model, tiny_tokenizer, 4)
    assert all(totals[name] for name in ("answered", "retried", "cancelled", "refused")), totals
    assert ends["fine"] and ends["RolloutError"], "commands that were killed are failures"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_of_soak_account_for_every_call(tiny_model, tiny_tokenizer):
    run_soak(tiny_model, tiny_tokenizer, 600)
