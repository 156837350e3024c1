"""Episodes of a user's own code, from the trainer's side: one loss, one trie, and failures that are counted."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode

from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer, Harness, harness_reward, replayed
from posttrain.data.forest import Layout, collate
from posttrain.errors import ArgumentTypeError, ConfigError, DataError, RewardError, RolloutError
from posttrain.extensions.agents import harness
from posttrain.extensions.agents.calls import Policy
from posttrain.extensions.agents.harness import HarnessOptions, HarnessRunner
from posttrain.extensions.agents.proxy import engine_sample
from posttrain.loop.evaluation import _Evaluation
from posttrain.loop.rollout import rollout_step, sample
from posttrain.loop.scoring import completion_metrics
from posttrain.loop.step import Loss
from posttrain.losses.reduce import Denominators, reduce
from posttrain.models.forward import forward
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.engines import create_engine
from posttrain.types import LossTerms, Rollout, Sampling, State
from tests.extensions.agents.agents import ASK, asynchronous, forking, single, sometimes
from tests.wordings import raises

ROWS = [{"prompt": ASK, "n": n} for n in range(4)]


def trainer_of(model, tokenizer, folder, harness, rewards=None, rows=ROWS, cls=GRPOTrainer, **options):
    settings = {
        "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "learning_rate": 1e-3, "bf16": False,
    }  # fmt: skip
    config = GRPOConfig if cls is GRPOTrainer else AsyncGRPOConfig
    args = config(str(folder), **{**settings, **options})
    return cls(model, rewards, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, harness=harness)


def first_log(trainer):
    return next(log for log in trainer.state.log_history if "loss" in log)


@pytest.fixture
def batch():
    """An episode of 9 trained tokens in three sequences, and one of 2."""
    forks = (Rollout([1, 2, 3], [8], [-0.1], "stop"), Rollout([1, 2, 3, 4, 9], [5, 6], [-0.2] * 2, "stop"))
    first = Rollout([1, 2], [3, 4, 7, 5, 6, 2, 2], [-0.3] * 7, "stop", tool_mask=[1, 1, 0, 1, 1, 1, 1], branches=forks)
    second = Rollout([1, 2], [6, 2], [-0.4] * 2, "stop")
    made = RolloutBatch([{"prompt": ASK}] * 2, [first, second], [[], []])
    made.columns["advantages"] = [1.0, -2.0]
    made.token_columns["old_logp"] = [list(one.logp) for one in made.sequences()]
    return made


@pytest.mark.parametrize("reduction", ["token", "sequence_token", "constant"])
def test_branches_of_an_episode_count_as_one_sequence_in_every_mean(batch, reduction):
    (laid,) = collate(batch.every_row(), pad_token_id=0, layout=Layout(row_tokens=64))
    torch.manual_seed(0)
    values = torch.rand(laid.input_ids.shape)
    assert laid.num_sequences == 4 and laid.num_episodes == pytest.approx(2)
    counts = Denominators(float(laid.num_loss_tokens), laid.num_episodes, 1)
    terms = LossTerms(values, laid.loss_mask, reduction, laid.sequence, laid.num_sequences, 5.0, share=laid.shares)
    # By hand: each episode is one list of tokens, whatever its branches are.
    by_origin = {origin: values[laid.loss_mask & (laid.sequence == s)] for s, origin in enumerate(laid.origin)}
    lists = [[], []]
    rows, episode_of = batch.every_row(), {}
    flat = [tuple(ids) for row in rows for ids in row.completions]
    for place, ids in enumerate(flat):
        episode_of[place] = 1 if ids == (6, 2) else 0
    for origin, kept in by_origin.items():
        lists[episode_of[origin]].append(kept)
    one, two = (torch.cat(parts) for parts in lists)
    expected = {
        "token": torch.cat([one, two]).mean(),
        "sequence_token": (one.mean() + two.mean()) / 2,
        "constant": (one.sum() + two.sum()) / (2 * 5.0),
    }[reduction]
    assert (len(one), len(two)) == (9, 2)
    assert float(reduce(terms, counts)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("reduction", ["token", "sequence_token", "constant"])
def test_an_evaluation_counts_the_branches_of_an_episode_as_one_sequence_too(batch, reduction):
    (laid,) = collate(batch.every_row(), pad_token_id=0, layout=Layout(row_tokens=64))
    values = torch.rand(laid.input_ids.shape, generator=torch.Generator().manual_seed(0))
    terms = LossTerms(values, laid.loss_mask, reduction, laid.sequence, laid.num_sequences, 5.0, share=laid.shares)
    hooks = SimpleNamespace(
        own_loss=False,
        prepare=None,
        eval_batches=lambda _, batches: list(batches),
        loss_of=lambda *_: Loss(terms.terms.sum(), terms=terms),
    )
    args = SimpleNamespace(device="cpu", batch_eval_metrics=False)
    run = SimpleNamespace(
        args=args,
        accelerator=Accelerator(cpu=True),
        hooks=hooks,
        log=print,
        spare_batch=None,
        now=State,
        method=SimpleNamespace(counts=lambda _: {}),
    )
    evaluation = _Evaluation(run, None, None, keeps_predictions=False, after_batch=list)
    counts = Denominators(float(laid.num_loss_tokens), laid.num_episodes, 1)
    assert evaluation.run([[laid]]) == pytest.approx(float(reduce(terms, counts)), rel=1e-6)


def test_credit_scales_the_advantage_of_its_branch_alone(batch):
    first, (one, other, *rest) = batch.rollouts[0], batch.rollouts[0].branches
    batch.rollouts[0] = replace(first, branches=(one, replace(other, credit=0.5), *rest))
    found = [v for row in batch.every_row() for v in row.sequence_columns["advantages"]]
    assert sorted(found) == [-2.0, 0.5, 1.0, 1.0]


def test_the_slices_of_a_generation_hold_whole_episodes(batch):
    slices = batch.slices(2, seed=0, skip_truncated=False)
    sizes = sorted(sum(len(row.completions) for row in rows) for rows in slices)
    assert sizes == [1, 3] and sum(
        v for rows in slices for row in rows for v in row.sequence_columns["share"]
    ) == pytest.approx(2)


def test_three_forks_train_as_one_trie_whose_tokens_and_flops_are_counted(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, forking, per_device_train_batch_size=2)
    generation = sample(trainer.run, [ROWS[0]] * 2, "train")
    generation.columns["advantages"] = [1.0, -1.0]
    session = generation.extra["session"][0]
    rollout = generation.rollouts[0]
    assert len(rollout.branches) == 3
    rows = dataclasses.replace(generation, rollouts=[rollout]).rows([0], skip_truncated=False)
    (together,) = collate(rows, pad_token_id=2, layout=Layout(row_tokens=512))
    apart = collate(rows, pad_token_id=2, layout=Layout(kind="padded", row_tokens=512))
    sequences = sum(len(r.prompt_ids) + len(r.token_ids) for r in (rollout, *rollout.branches))
    assert together.num_tokens <= session.tokens_once() + 16 and sum(b.num_tokens for b in apart) == sequences
    assert together.num_loss_tokens == sum(b.num_loss_tokens for b in apart) == session.counts.tokens
    flops = []
    for batches in ([together], apart):
        with FlopCounterMode(display=False) as counter:
            outputs = [forward(tiny_model, one, frozenset({"logp"})) for one in batches]
        flops.append(counter.get_total_flops())
        # One gradient either way.
        total = sum(out.logp[one.loss_mask].sum() for out, one in zip(outputs, batches, strict=True))
        tiny_model.zero_grad()
        total.backward()
        flops.append(torch.cat([p.grad.flatten() for p in tiny_model.parameters()]))
    once, gradient, many, other = flops
    assert torch.allclose(gradient, other, atol=1e-4 * float(gradient.abs().max()))
    print(f"tokens {together.num_tokens} against {sequences}, FLOPs {once} against {many}")
    assert once < 0.75 * many


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_first_step_has_ratio_one_and_the_engines_logprobs(tiny_model, tiny_tokenizer, tmp_path, loss):
    options = {"loss_type": loss, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, forking, **options)
    trainer.train()
    log = first_log(trainer)
    assert log["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert log["sampling/sampling_logp_difference/max"] < 1e-5
    assert (log["harness/answered"], log["harness/failed_episodes"]) == (5, 0) and log["harness/branches"] >= 4
    assert log["grad_norm"] > 0 and log["harness/tokens_once_share"] < 0.7
    assert trainer.harness.proxy is None, "training over, nothing listens"


def test_episodes_that_fail_are_left_out_counted_and_said(tiny_model, tiny_tokenizer, tmp_path, caplog):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, sometimes)
    with caplog.at_level(logging.WARNING):
        generation = rollout_step(trainer.run, [row for row in ROWS for _ in range(2)], "train")
    errors = generation.extra["harness_error"]
    assert [error and error.split(":")[0] for error in errors[::2]] == ["ValueError", "NoCall", "NoResult", None]
    assert [bool(r.token_ids) for r in generation.rollouts] == [False] * 6 + [True] * 2
    assert generation.columns["advantages"][:6] == [0.0] * 6
    assert "6 of 8 episodes of the harness failed" in caplog.text and "this agent is broken" in caplog.text
    shares = [v for row in generation.every_row() for v in row.sequence_columns["share"]]
    assert sum(shares) == 2, "nothing of them is in a denominator"


def test_episodes_that_fail_have_the_reward_that_the_config_says(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, sometimes, harness_failure=-1.0)
    generation = rollout_step(trainer.run, [row for row in ROWS[2:] for _ in range(2)], "train")
    assert [bool(r.token_ids) for r in generation.rollouts] == [True] * 4
    table = trainer.score(generation, "train")
    assert table.values[:2, 0].tolist() == [-1.0, -1.0] and bool((table.values[2:, 0] >= 0).all())


def test_rewards_of_the_user_see_messages_the_result_and_the_session(tiny_model, tiny_tokenizer, tmp_path):
    seen = []

    def judge(completions, harness_result, session, n, **_):
        seen.extend(zip(completions, harness_result, session, n, strict=True))
        return [float(len(c)) for c in completions]

    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, forking, judge)
    trainer.train()
    messages, result, session, _ = seen[0]
    assert messages[-1]["role"] == "assistant" and isinstance(result, float) and len(session.calls) == 5
    assert first_log(trainer)["reward"] > 0


def test_an_asynchronous_harness_is_told_model_and_seed(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, asynchronous)
    generation = sample(trainer.run, [row for row in ROWS[:2] for _ in range(2)], "train")
    seeds = [result["seed"] for result in generation.extra["harness_result"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3], "one seed for completions that are compared"


@pytest.mark.parametrize("name", ["native", "hf"])
def test_rows_of_one_group_draw_apart_on_whichever_process_they_are(tiny_model, tiny_tokenizer, name):
    engine = create_engine(name, tiny_model, pad_token_id=tiny_tokenizer.pad_token_id)
    policy = Policy(tiny_tokenizer, Sampling(8, stop_token_ids=(2,)), context=512, vocabulary=len(tiny_tokenizer))
    per_request, drawn = engine.capabilities.per_request_sampling, []
    for place in (0, 2):  # Of two processes, each with half of the group.
        runner = HarnessRunner(Harness(single), HarnessOptions())
        options = {"per_request": per_request, "place": place}
        drawn += runner.run([ROWS[0]] * 2, [5, 5], policy, engine_sample(engine), **options)
        runner.close()
    assert len({tuple(one.session.calls[0].completions[0].token_ids) for one in drawn}) == 4


def test_a_command_line_is_a_harness(tiny_model, tiny_tokenizer, tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, sys, urllib.request\n"
        "row = json.loads(os.environ['POSTTRAIN_TASK'])\n"
        "assert row == json.load(sys.stdin)\n"
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'messages': row['prompt']}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "reply = urllib.request.urlopen(urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head))\n"
        "print('working')\n"
        "result = {'reward': len(json.load(reply)['choices']), 'said': 'one\\u2028two'}\n"
        "sys.stdout.buffer.write(json.dumps(result, ensure_ascii=False).encode())\n"
        "sys.exit(3 if row['n'] == 1 else 0)\n"
    )
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, [sys.executable, str(script)])
    generation = sample(trainer.run, ROWS[:2], "train")
    assert generation.extra["harness_result"] == [{"reward": 1, "said": "one\u2028two"}, None]
    assert "exit code 3" in generation.extra["harness_error"][1]


def test_a_command_may_have_a_long_row_print_what_is_no_text_and_leave_a_server_behind(
    tiny_model, tiny_tokenizer, tmp_path
):
    script = tmp_path / "agent.py"
    script.write_text(
        "import json, os, subprocess, sys, urllib.request\n"
        "row = json.load(sys.stdin)\n"
        "assert ('POSTTRAIN_TASK' in os.environ) == (len(row['document']) < 1000)\n"
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'messages': row['prompt']}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "urllib.request.urlopen(urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head))\n"
        "subprocess.Popen(['sleep', '30'])\n"
        "sys.stdout.buffer.write(b'\\xff\\xfe\\n' * 10); print(len(row['document']))\n"
    )
    rows = [{"prompt": ASK, "document": "x" * size} for size in (10, 300_000)]
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, [sys.executable, str(script)], rows=rows)
    begin = time.monotonic()
    generation = sample(trainer.run, rows, "train")
    assert generation.extra["harness_error"] == [None, None]
    assert generation.extra["harness_result"] == [10, 300_000] and time.monotonic() - begin < 20


def commanded(policy_file, source, tmp_path, model, tokenizer, **options):
    """Results and errors of two episodes whose command calls the policy and goes on with ``source``."""
    policy_file.write_text(
        "import json, os, subprocess, sys, urllib.request\n"
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'messages': json.load(sys.stdin)['prompt']}).encode()\n"
        "head = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "urllib.request.urlopen(urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head))\n"
        + source
    )
    trainer = trainer_of(model, tokenizer, tmp_path, [sys.executable, str(policy_file)], **options)
    extra = sample(trainer.run, ROWS[:2], "train").extra
    return extra["harness_result"], extra["harness_error"]


def test_a_command_gets_the_variables_of_the_list_alone(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_TOKEN", "LC_TIME"):
        monkeypatch.setenv(name, "x")
    ask = "print(json.dumps(sorted({'HF_TOKEN', 'WANDB_API_KEY', 'MY_TOKEN', 'LC_TIME', 'PATH'} & set(os.environ))))\n"
    for more, names in ((None, []), (["MY_*"], ["MY_TOKEN"]), (["*"], ["HF_TOKEN", "MY_TOKEN", "WANDB_API_KEY"])):
        results, errors = commanded(tmp_path / "agent.py", ask, tmp_path, tiny_model, tiny_tokenizer, harness_env=more)
        assert errors == [None, None] and results[0] == sorted(["LC_TIME", "PATH", *names])


def test_of_a_commands_output_the_end_is_read(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "OUTPUT_READ", 1000)
    monkeypatch.setattr(harness, "LARGEST_FILE", 1 << 20)
    read = harness._last_output
    sizes = []
    monkeypatch.setattr(harness, "_last_output", lambda file: sizes.append(len(text := read(file))) or text)

    def output(source):
        return commanded(tmp_path / "agent.py", source, tmp_path, tiny_model, tiny_tokenizer)

    assert output("print('x\\n' * 10_000)\nprint(7)\n") == ([7, 7], [None, None])
    assert max(sizes) == 1000
    assert "longer than 1000 bytes" in output("print('7' * 10_000)\n")[1][0]
    assert "File too large" in output("print('7' * (1 << 21), flush=True)\n")[1][0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_daemon_ends_with_its_command(tiny_model, tiny_tokenizer, tmp_path):
    source = (
        "one = subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "print(one.pid)\n"
    )  # fmt: skip
    results, errors = commanded(tmp_path / "agent.py", source, tmp_path, tiny_model, tiny_tokenizer)
    assert errors == [None, None]
    for pid in results:
        with pytest.raises(ProcessLookupError):
            for _ in range(100):  # Until the system has removed what was killed.
                os.kill(pid, 0)
                time.sleep(0.02)


def test_a_harness_that_never_ends_is_ended_and_so_is_what_it_started(tiny_model, tiny_tokenizer, tmp_path):
    mark = tmp_path / "alive"
    shell = f"(sleep 2; touch {mark}) & sleep 60"
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, shell, harness_timeout=0.5)
    begin = time.monotonic()
    generation = sample(trainer.run, ROWS[:2], "train")
    assert time.monotonic() - begin < 20 and "harness_timeout=0.5" in generation.extra["harness_error"][0]
    time.sleep(2.5)
    assert not mark.exists()


def test_an_engine_that_fails_ends_the_run_and_not_the_wait_for_harnesses(
    tiny_model, tiny_tokenizer, tmp_path, monkeypatch
):
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, single)

    def broken(requests, sampling):
        raise RolloutError("the logits are NaN")

    monkeypatch.setattr(trainer.engine, "generate", broken)
    with pytest.raises(RolloutError, match="NaN"):
        sample(trainer.run, ROWS[:2], "train")


STUCK = """
import contextlib, time
from posttrain.extensions.agents import harness
from posttrain.extensions.agents.calls import Policy
from posttrain.extensions.agents.harness import Harness, HarnessOptions, HarnessRunner
from posttrain.types import Sampling
from tests.conftest import build_tokenizer

def fails(here):
    raise RuntimeError("another process failed")

runner = HarnessRunner(Harness(lambda *_: time.sleep(120)), HarnessOptions(timeout=None))
with contextlib.suppress(RuntimeError):
    runner.run([{"n": 0}], [0], Policy(build_tokenizer(), Sampling(4)), None, any_process=fails)
runner.close()
print("the end")
"""


@pytest.mark.matrix
@pytest.mark.slow
def test_a_program_ends_while_a_harness_does_not():
    # An interpreter of its own: a fork of the tests ends without waiting for threads.
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "the end" in done.stdout, done.stderr


def test_what_was_recorded_trains_again_without_harness_and_without_sampling(
    tiny_model, tiny_tokenizer, tmp_path, monkeypatch
):
    path, start = tmp_path / "episodes.jsonl", {k: v.clone() for k, v in tiny_model.state_dict().items()}
    first = trainer_of(tiny_model, tiny_tokenizer, tmp_path / "a", forking, harness_record=str(path))
    first.train()
    tiny_model.load_state_dict(start)
    again = trainer_of(tiny_model, tiny_tokenizer, tmp_path / "b", replayed(path))
    monkeypatch.setattr(again.engine, "generate", None)
    again.train()
    ours, theirs = first_log(first), first_log(again)
    for name in ("loss", "grad_norm", "reward", "completions/mean_length"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-7), name
    other = trainer_of(tiny_model, tiny_tokenizer, tmp_path / "c", replayed(path), rows=[{"prompt": ASK, "n": 9}] * 4)
    with raises(DataError, "episodes.jsonl", "'n': 9"):
        sample(other.run, [{"prompt": ASK, "n": 9}], "train")


def test_a_result_that_is_an_object_is_recorded_by_its_number(tiny_model, tiny_tokenizer, tmp_path):
    def judged(task, base_url, api_key):
        return SimpleNamespace(reward=single(task, base_url, api_key))

    path = tmp_path / "episodes.jsonl"
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, judged, harness_record=str(path))
    made = sample(trainer.run, ROWS[:2], "train").extra["harness_result"]
    again = sample(trainer_of(tiny_model, tiny_tokenizer, tmp_path, replayed(path)).run, ROWS[:2], "train")
    assert harness_reward([], again.extra["harness_result"]) == [one.reward for one in made]


def test_credit_and_a_filter_choose_what_is_trained(tiny_model, tiny_tokenizer, tmp_path):
    harness = Harness(
        forking, credit=lambda s: [1.0, 0.0, 0.5, 0.5][: len(s.branches())], trains=lambda call: call.number != 0
    )
    trainer = trainer_of(tiny_model, tiny_tokenizer, tmp_path, harness)
    generation = sample(trainer.run, ROWS[:1] * 2, "train")
    rollout, session = generation.rollouts[0], generation.extra["session"][0]
    first = len(session.calls[0].completions[0].token_ids)
    assert [one.credit for one in (rollout, *rollout.branches)] == [1.0, 0.0, 0.5, 0.5]
    assert not any(rollout.tool_mask[:first]) and sum(rollout.tool_mask) == len(
        session.calls[1].completions[0].token_ids
    )
    wrong = trainer_of(tiny_model, tiny_tokenizer, tmp_path, Harness(forking, credit=lambda s: [1.0]))
    with raises(RolloutError, "1 numbers", "4 branches"):
        sample(wrong.run, ROWS[:1] * 2, "train")


@pytest.mark.slow
def test_workers_run_a_harness(tiny_model, tiny_tokenizer, tmp_path):
    trainer = trainer_of(
        tiny_model, tiny_tokenizer, tmp_path, forking, cls=AsyncGRPOTrainer, max_steps=2, token_budget=0
    )
    trainer.train()
    log = first_log(trainer)
    assert log["ratio/max"] == pytest.approx(1, abs=1e-4) and log["harness/answered"] == 5
    account = trainer.account()
    assert account["async/produced"] == account["async/trained"] + account["async/dropped"] + account["async/in_flight"]


def test_what_does_not_go_together_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    with raises(ConfigError, "harness"):
        GRPOTrainer(tiny_model, None, GRPOConfig(str(tmp_path)), train_dataset=[], tools=[single], harness=single)
    with raises(ConfigError, "dynamic_sampling=2"):
        trainer_of(tiny_model, tiny_tokenizer, tmp_path, single, dynamic_sampling=2)
    with raises(ArgumentTypeError, "3"):
        Harness(3)
    with raises(ArgumentTypeError, "[]"):
        Harness([])
    with raises(RewardError, "'fine'"):
        harness_reward([[]], ["fine"])
    with raises(ConfigError, "harness_failure", "'drop'"):
        GRPOConfig(str(tmp_path), harness_failure="drop")


def test_the_harness_own_number_is_read_in_every_form():
    class Result:
        reward = 3

    results = [1, True, "0.5", {"reward": 2}, Result(), None]
    assert harness_reward([[]] * 6, json.loads("[]") or results) == [1.0, 1.0, 0.5, 2.0, 3.0, None]


@pytest.mark.parametrize(("reasons", "clipped", "masked"), [(("stop", "stop"), 0, 0), (("length", "length"), 1, 1)] + [
    (reasons, 1, 0) for reasons in (("length", "stop"), ("stop", "length"))
])  # fmt: skip
def test_an_episode_is_cut_where_a_branch_was_and_masked_where_nothing_of_it_is_trained(reasons, clipped, masked):
    first, other = (Rollout([5], [6, 7], [-1.0, -1.0], reason) for reason in reasons)
    batch = RolloutBatch([{}], [replace(first, branches=(other,))], ["c"])
    found = completion_metrics(batch, masks_truncated=True)
    trained = sum(sum(mask) for row in batch.rows([0], skip_truncated=True) for mask in row.loss_masks)
    assert (float(found["completions/masked_ratio"].value), trained == 0) == (masked, bool(masked))
    assert float(found["completions/clipped_ratio"].value) == clipped
