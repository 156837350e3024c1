"""The reward contract: what functions get, and a named error for each way to break it."""

import asyncio
import functools
import math
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.checks.registry import Preflight
from posttrain.checks.rewards import unscored_rows
from posttrain.errors import ConfigError, MissingDependencyError, RewardError
from posttrain.loop.reward_watch import RewardWatch
from posttrain.rewards.call import parallel
from posttrain.rewards.runner import RewardRunner, RewardTable
from posttrain.types import Advantages
from tests.wordings import raises

TWO = {"prompts": ["p0", "p1"], "completions": ["a", "bb"], "completion_ids": [[1], [2, 3]]}


def run(*functions, **kwargs):
    return RewardRunner(list(functions), kwargs.pop("weights", None))(**(TWO | kwargs))


def watch_of(runner):
    checks = SimpleNamespace(preflight=Preflight("off"), report=list)
    return RewardWatch(runner, SimpleNamespace(checks=checks), scaled=True)


class Watched:
    """Functions whose batches are called, finished and watched; rows of one prompt are a group."""

    def __init__(self, *args, **kwargs):
        self.runner = RewardRunner(*args, **kwargs)
        self.watch = watch_of(self.runner)

    def __call__(self, columns=None, training=True, **rows):
        prompts = rows["prompts"]
        groups = torch.tensor([prompts.index(prompt) for prompt in prompts])
        table = self.runner.finish(self.runner(**rows, columns=columns), groups, training=training)
        made = Advantages(torch.ones(len(groups)), table.values[:, 0])
        self.watch.report(table, made, groups, None, prompts, columns, training=training)
        return table


def length(completions, **_):
    return [len(c) for c in completions]


def test_columns_arrive_as_keyword_arguments():
    seen = {}

    def spy(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        seen.update(locals())
        return [0.0, 1.0]

    table = run(spy, columns={"answer": [7, 8]}, trainer_state="state")
    assert (seen["answer"], seen["trainer_state"], seen["completion_ids"]) == ([7, 8], "state", [[1], [2, 3]])
    assert table.values.tolist() == [[0.0], [1.0]]


def test_none_means_not_applicable_and_bool_tensor_and_numpy_are_numbers():
    table = run(
        lambda **_: [None, True], lambda **_: torch.tensor([1.0, 2.0]), lambda **_: [np.float32(3), np.int64(4)]
    )
    assert math.isnan(table.values[0, 0])
    assert table.values[1].tolist() == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (0.5, "returned 0.5 .float.. It must return a list of 2 numbers"),
        ("no", "It must return a list of 2 numbers"),
        ([1.0, "high"], "returned 'high' .str. for row 1"),
        ([float("inf"), 0], "returned inf for row 0"),
        (None, "returned None"),
    ],
)
def test_a_wrong_return_names_function_and_row(returned, message):
    def broken(**_):
        return returned

    with pytest.raises(RewardError, match=message) as caught:
        run(broken)
    assert "'broken'" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_exception_names_the_function_and_keeps_its_cause():
    def parse(completions, **_):
        return [int(c) for c in completions]

    with raises(RewardError, "'parse'", "'one'") as caught:
        run(parse, completions=["1", "one"])
    assert isinstance(caught.value.__cause__, ValueError)


def test_nan_is_an_error_in_the_dry_run_and_counted_later():
    def nan(completions, **_):
        return [float("nan")] * len(completions)

    runner = RewardRunner(nan)
    with raises(RewardError, "row 0"):
        runner.dry_run([{"prompt": "q"}], conversational=False)
    table = RewardRunner([nan, length])(**TWO)
    assert table.values[:, 0].isnan().all()
    assert table.metrics["rewards/nan/nan"].value == 2.0


def test_the_dry_run_catches_one_number_for_the_whole_batch():
    with raises(RewardError, "1", "2"):
        RewardRunner(lambda **_: [1.0]).dry_run([{"prompt": "q", "answer": 1}], conversational=True)


def test_the_dry_run_passes_a_whole_group_of_one_prompt_and_a_number_of_steps():
    def grouped(prompts, completions, completion_ids, answer, trainer_state, **_):
        assert len(set(prompts)) == len(set(answer)) == 1 and len(completions) == len(completion_ids)
        share = trainer_state.global_step / trainer_state.max_steps
        return (torch.arange(len(completions)).view(-1, 4) * share).flatten().tolist()

    rows = [{"prompt": "q", "answer": 1}, {"prompt": "r", "answer": 2}]
    RewardRunner(grouped).dry_run(rows, conversational=False, group=4, max_steps=-1)


def test_async_functions_are_awaited_and_mixed_with_sync_ones():
    class Judge:
        async def __call__(self, completions, **_):
            return [2.0 * len(c) for c in completions]

    async def one(completions, **_):
        return [1.0] * len(completions)

    table = run(one, length, Judge())
    assert table.names == ["one", "length", "Judge"]
    assert table.values.tolist() == [[1.0, 1.0, 2.0], [1.0, 2.0, 4.0]]


def test_an_async_failure_names_its_function():
    async def fail(**_):
        raise RuntimeError("judge is down")

    with raises(RewardError, "'fail'"):
        run(fail)


def test_r32_equal_names_are_told_apart_and_partials_keep_theirs():
    runner = RewardRunner([length, functools.partial(length), length])
    assert runner.names == ["length", "length_1", "length_2"]


def test_a_function_cannot_change_what_the_next_one_sees():
    def vandal(completions, **_):
        completions[0] = "changed"
        return [0, 0]

    assert run(vandal, length).values[:, 1].tolist() == [1.0, 2.0]


def test_weights_must_be_one_a_function():
    with raises(ConfigError, "reward_weights", "1", "2"):
        RewardRunner([length, length], [1.0])
    with raises(ConfigError):
        RewardRunner([])


def none_if(skip):
    def maybe(completions, **_):
        return [None if c in skip else 1.0 for c in completions]

    return maybe


def batch(*completions, prompts=None, **kwargs):
    n = len(completions)
    return {
        "prompts": prompts or [f"p{i}" for i in range(n)],
        "completions": list(completions),
        "completion_ids": [[1]] * n,
        **kwargs,
    }


def test_unscored_rows_are_warned_at_first_and_every_hundredth_time(caplog):
    scored = Watched(none_if("b"))
    for _ in range(101):
        table = scored(**batch("a", "b", "c", columns={"task": [1, 2, 3]}))
    assert caplog.text.count("All reward functions returned None for row 1") == 2
    assert "'task': 2" in caplog.text
    assert table.metrics["groups/unscorable"].value == 1.0


def test_r16_a_first_batch_that_nobody_scores_is_told_loudly(caplog):
    Watched(none_if("ab"))(**batch("a", "b", columns={"task": ["code", "code"]}))
    text = r"NO USABLE REWARD.*\(maybe\).*every row of the first batch.*\['task'\].*stop_without_signal"
    assert re.search(text, caplog.text)


def test_r16_mostly_unscored_batches_are_told_at_the_fifth_in_a_row(caplog):
    scored = Watched(none_if("b"))
    scored(**batch("a", "a", "a"))
    for _ in range(4):
        scored(**batch("b", "b", "a"))
    scored(**batch("a", "b"))  # Half is not more than half: the count starts again.
    for _ in range(4):
        scored(**batch("b", "b", "a"))
    assert "NO USABLE REWARD" not in caplog.text
    scored(**batch("b", "b", "a"))
    assert "67% of the rows, in 5 consecutive batches" in caplog.text


def test_a_dry_run_does_not_count_as_the_first_batch(caplog):
    scored = Watched(none_if(["0", "The answer is 1.", "b"]))
    scored.runner.dry_run([{"prompt": "q"}], conversational=False)
    assert "first batch" not in caplog.text
    scored(**batch("b"))
    assert "first batch" in caplog.text


def test_the_state_of_a_dry_run_is_one():
    seen = []

    def reads(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.log_history))
        return [0.0 for _ in completions]

    RewardRunner(reads).dry_run([{"prompt": "q"}], conversational=False)
    assert seen == [(0, [])]


def test_r16_a_group_scored_in_part_by_a_function_is_warned_with_its_name(caplog):
    scored = Watched([length, none_if("b")])
    scored(**batch("a", "b", "b", prompts=["p", "q", "q"]))
    assert "totals" not in caplog.text
    scored(**batch("a", "b", "b", prompts=["p", "p", "q"]))
    assert "maybe returned None for some completions of a prompt" in caplog.text
    assert "in 1 groups" in caplog.text


def test_rows_of_all_processes_can_be_judged_after_gathering():
    runner = RewardRunner(none_if("b"))
    table = runner(**batch("b", "b"))
    table = replace(table, values=torch.cat([table.values, torch.ones(2, 1)]))
    assert runner.finish(table, torch.tensor([0, 0, 1, 1])).values.isnan().sum() == 2


def test_an_unscored_row_is_shown_with_its_own_prompt_on_the_process_that_has_it():
    table = RewardTable(torch.tensor([[1.0], [1.0], [1.0], [math.nan]]), ["r"], torch.ones(1), start=2)
    groups, prompts, columns = torch.tensor([0, 0, 1, 1]), ["p2", "p3"], {"task": [2, 3]}
    (notice,) = unscored_rows(table, groups, prompts, columns)
    assert "for row 3 (and 0 more). Prompt: 'p3'. Its columns: \"{'task': 3}\"" in notice.text
    (notice,) = unscored_rows(replace(table, start=0), groups, prompts, columns)
    assert "(on another process)" in notice.text


def test_extra_columns_and_metrics_are_logged_and_clashes_prefixed():
    def a(log_extra, log_metric, **_):
        log_extra("gold", ["x", "y"])
        log_metric("parsed", 0.5)
        return [0, 0]

    def b(log_extra, **_):
        log_extra("gold", [1, 2])
        return [0, 0]

    table = run(a, b)
    assert table.extra_columns == {"gold": ["x", "y"], "b/gold": [1, 2]}
    assert "parsed" in table.metrics


def test_a_clash_is_resolved_in_the_order_of_the_functions_not_of_their_answers():
    async def slow(log_extra, **_):
        await asyncio.sleep(0.05)
        log_extra("gold", ["slow", "slow"])
        return [0, 0]

    async def fast(log_extra, **_):
        log_extra("gold", ["fast", "fast"])
        log_extra("step", [1, 2])
        return [0, 0]

    table = run(slow, fast)
    assert table.extra_columns == {"gold": ["slow"] * 2, "fast/gold": ["fast"] * 2, "fast/step": [1, 2]}


def test_a_logged_metric_is_the_mean_of_its_calls():
    def f(log_metric, **_):
        for value in (1.0, 2.0, float("nan"), 6.0):
            log_metric("depth", value)
        return [0, 0]

    assert run(f).metrics["depth"].value == 3.0


def test_logging_the_wrong_number_of_values_is_an_error():
    def f(log_extra, **_):
        log_extra("gold", ["x"])
        return [0, 0]

    with raises(RewardError, "1", "'gold'", "2"):
        run(f)


def test_asynchronous_functions_wait_at_the_same_time():
    started = []

    def waiting(name):
        async def judge(**_):
            started.append(name)
            while len(started) < 3:  # Ends only if the others start before this one is done.
                await asyncio.sleep(0.001)
            return [1.0, 1.0]

        return judge

    @parallel
    def blocking(**_):
        started.append("thread")
        while len(started) < 3:
            time.sleep(0.001)
        return [2.0, 2.0]

    assert (
        RewardRunner([parallel(waiting("a")), waiting("b"), blocking], timeout=5)(**TWO).values.tolist()
        == [[1.0, 1.0, 2.0]] * 2
    )
    started.clear()
    table = RewardRunner([waiting("a"), waiting("b"), blocking], timeout=5)(**TWO)
    assert table.values.tolist() == [[1.0, 1.0, 2.0]] * 2
    assert set(table.seconds) == {"judge", "judge_1", "blocking"}


def test_asynchronous_functions_run_after_the_others_and_on_one_lasting_loop():
    order, loops = [], []

    async def later(**_):
        order.append("async")
        loops.append(asyncio.get_running_loop())
        return [0, 0]

    def first(**_):
        order.append("sync")
        assert threading.current_thread() is threading.main_thread()
        return [0, 0]

    runner = RewardRunner([later, first])
    runner(**TWO)
    runner(**TWO)
    assert order == ["sync", "async"] * 2
    assert loops[0] is loops[1]


def test_rewards_run_inside_a_running_loop():
    async def one(**_):
        return [1.0, 1.0]

    async def notebook():
        return run(one)

    assert asyncio.run(notebook()).values.tolist() == [[1.0], [1.0]]


def test_an_unawaited_coroutine_from_a_plain_function_is_awaited():
    async def inner():
        return [4.0, 5.0]

    assert run(lambda **_: inner()).values.tolist() == [[4.0], [5.0]]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_function_that_hangs_is_named_after_its_timeout(asynchronous):
    release = threading.Event()

    async def hang(**_):
        await asyncio.sleep(30)

    def hang_plain(**_):
        release.wait(30)

    with raises(RewardError, "reward_timeout=0.05", "2", "'p0'"):
        RewardRunner(hang if asynchronous else hang_plain, timeout=0.05)(**TWO)
    release.set()


def test_a_coroutine_that_never_gives_the_loop_back_is_named_and_later_calls_go_on(monkeypatch):
    monkeypatch.setattr("posttrain.rewards.call.GRACE_SECONDS", 0.05)
    release = threading.Event()

    async def polite(**_):
        await asyncio.sleep(0.1)
        return [1.0, 1.0]

    async def blocks(**_):
        release.wait(30)  # As a client without await does.
        return [0.0, 0.0]

    try:
        with raises(RewardError, "'polite'", "'blocks'", "reward_timeout=0.2"):
            RewardRunner([polite, blocks], timeout=0.2)(**TWO)
        assert run(polite).values.tolist() == [[1.0], [1.0]]
    finally:
        release.set()


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending():
    release = threading.Event()

    @parallel
    def hang(**_):
        release.wait(30)
        return [0.0, 0.0]

    before = {t for t in threading.enumerate() if not t.daemon}
    try:
        with raises(RewardError, "'hang'", "reward_timeout=0.05"):
            RewardRunner(hang, timeout=0.05)(**TWO)
        assert {t for t in threading.enumerate() if not t.daemon} <= before  # Python waits for the others at its end.
    finally:
        release.set()


def test_a_function_without_kwargs_gets_only_what_it_names():
    assert run(lambda completions, answer=None: answer, columns={"answer": [1, 2], "noise": [0, 0]}).values[
        :, 0
    ].tolist() == [1, 2]


def test_a_column_that_is_missing_is_named_with_the_closest_one():
    def f(completions, solution, **_):
        return [0, 0]

    with raises(RewardError, "'f'", "'solution'", "'solutions'"):
        run(f, columns={"solutions": [1, 2]})


@pytest.mark.parametrize(
    "values",
    [
        [torch.tensor([1.5]), torch.tensor([[2]])],
        [np.array([1.5], dtype=np.float32), np.array([[2]])],
        torch.tensor([1.5, 2.0]).split(1),
        [torch.tensor(1.5, requires_grad=True), torch.tensor([2.0], requires_grad=True)],
    ],
)
def test_a_reward_may_be_a_tensor_of_one_element(values):
    assert run(lambda **_: values).values.tolist() == [[1.5], [2.0]]
    with raises(RewardError, "row 0"):
        run(lambda **_: [torch.tensor([1.0, 2.0]), 0.0])


@pytest.mark.parametrize("kind", [asyncio.CancelledError, GeneratorExit])
def test_a_function_that_cancels_itself_is_named(kind):
    def gives_up(**_):
        raise kind

    with pytest.raises(RewardError, match=f"'gives_up' raised {kind.__name__}"):
        run(gives_up)


def test_a_column_with_the_name_of_an_argument_gives_way_to_it_and_is_told_or_refused(caplog):
    seen = []

    def reward(trainer_state, answer, **_):
        seen.append((trainer_state, answer))
        return [0.0, 1.0]

    run(reward, columns={"trainer_state": [1, 2], "log_extra": [3, 4], "answer": [5, 6]})
    assert seen == [(None, [5, 6])]
    assert sum("'trainer_state'" in r.getMessage() or "'log_extra'" in r.getMessage() for r in caplog.records) == 2
    with raises(RewardError, "'completions'"):
        run(length, columns={"completions": [1, 2]})
    with raises(RewardError, "'answer'", "1", "2"):
        run(length, columns={"answer": [1]})


def test_environments_and_prompt_suffixes_are_passed_only_when_there_are_any():
    seen = []

    def f(**kwargs):
        seen.append(set(kwargs))
        return [0, 0]

    run(f)
    run(f, environments=["e0", "e1"], prompt_suffixes=["<think>", ""])
    assert not {"environments", "prompt_suffixes"} & seen[0]
    assert seen[1] - seen[0] == {"environments", "prompt_suffixes"}
    assert "trainer_state" in seen[0]


def test_r26_editing_messages_and_columns_stays_private():
    def vandal(prompts, completions, completion_ids, answer, **_):
        prompts[0][0]["content"] = completions[1][0]["content"] = "changed"
        completions[0].append("more")
        completion_ids[0].append(9)
        answer[0] = "wrong"
        return [0, 0]

    messages = [[{"role": "user", "content": "q"}]] * 2
    answers = [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "bb"}]]

    def check(prompts, completions, completion_ids, answer, **_):
        assert (prompts, completions, completion_ids, answer) == (messages, answers, [[1], [2, 3]], ["x", "y"])
        return [0, 0]

    run(vandal, check, prompts=messages, completions=answers, columns={"answer": ["x", "y"]})


def test_editing_what_a_message_or_a_column_holds_stays_private():
    def vandal(prompts, completions, parts, **_):
        prompts[0][0]["content"][0]["text"] = completions[0][0]["tool_calls"][0]["name"] = "changed"
        parts[0]["steps"].append("more")
        parts[1].clear()
        return [0, 0]

    blocks = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
    calls = [{"role": "assistant", "tool_calls": [{"name": "add"}]}]
    seen = []

    def check(prompts, completions, parts, **_):
        seen.append((prompts[0][0]["content"][0]["text"], completions[0][0]["tool_calls"][0]["name"], parts))
        return [0, 0]

    columns = {"parts": [{"steps": ["one"]}, ["two"]]}
    run(vandal, check, prompts=[blocks, blocks], completions=[calls, calls], columns=columns)
    assert seen == [("q", "add", [{"steps": ["one"]}, ["two"]])]


def test_a_missing_package_keeps_its_own_message():
    def f(**_):
        raise MissingDependencyError("install math")

    with raises(MissingDependencyError):
        run(f)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.ones((2, 1)), r"returned shape \(2, 1\). It must return one number per row, shape \(2,\)"),
        (torch.tensor(1.0), "returned 1.0"),
        ({0: 1, 1: 2}, "returned {0: 1, 1: 2} .dict."),
        ([1 + 2j, 0], r"returned \(1\+2j\) .complex. for row 0"),
        ([[1.0], [2.0]], "returned .1.0. .list. for row 0"),
        (
            [0.0, 1e300],
            "returned 1e.300 for row 1. It must return a number whose absolute value is at most 1e.12, or None",
        ),
    ],
)
def test_r17_nothing_is_broadcast_flattened_or_rounded_to_infinity(returned, message):
    with pytest.raises(RewardError, match=message):
        run(lambda **_: returned)


def test_two_runners_from_one_list_share_nothing():
    functions, weights = [length, length], [1.0, 2.0]
    first = RewardRunner(functions, weights)
    functions.append(length)
    assert len(RewardRunner(functions).functions) == 3
    assert (len(first.functions), first.weights.tolist(), functions) == (2, [1.0, 2.0], [length] * 3)


def test_suffixes_never_collide_with_a_real_name():
    def length_1(**_):
        return [0, 0]

    assert RewardRunner([length_1, length, length]).names == ["length_1", "length", "length_2"]


def test_transforms_change_values_and_keep_the_raw_ones():
    table = Watched([length, length], transforms=["clip:0:1.5", None])(**TWO)
    assert table.values.tolist() == [[1.0, 1.0], [1.5, 2.0]]
    assert table.raw.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    raw = table.metrics["rewards/length/raw_mean"]
    assert raw.value / raw.weight == 1.5
    with raises(ConfigError, "reward_transform", "1", "2"):
        RewardRunner([length, length], transforms=["none"])


def test_a_function_that_raises_is_named_with_its_file_and_line_and_a_network_error_has_its_own_advice():
    def divides(completions, **_):
        return [1 / 0 for _ in completions]

    def asks(completions, **_):
        raise ConnectionRefusedError("nobody there")

    line = divides.__code__.co_firstlineno + 1
    with raises(RewardError, "'divides'", f"{__file__}:{line}", "division by zero"):
        run(divides)
    with raises(RewardError, "'asks'", "nobody there", "network"):
        run(asks)


def test_a_function_that_runs_long_is_told_of_at_every_doubling_though_no_limit_is_set(monkeypatch, caplog):
    monkeypatch.setattr("posttrain.rewards.call.SECONDS_UNTIL_LOGGED", 0.05)

    def slow(completions, **_):
        time.sleep(0.5)
        return [0.0] * len(completions)

    run(slow)
    told = re.findall(r"slow has been scoring 2 completions for ([\d.]+) s", caplog.text)
    assert told[:3] == ["0.05", "0.1", "0.2"]


def test_rewards_that_became_nan_end_the_run_after_ten_batches_and_one_scored_batch_begins_anew():
    answers = iter([1.0, *[math.nan] * 9, 1.0, *[math.nan] * 10])

    def turns(completions, **_):
        return [next_answer] * len(completions)

    scored = Watched(turns)
    for number, next_answer in enumerate(answers):  # noqa: B007
        if number == 20:
            with raises(RewardError, "10", "turns"):
                scored(**TWO)
            return
        scored(**TWO)


def test_an_evaluation_that_nobody_scores_ends_no_run_and_one_that_somebody_does_excuses_none(caplog):
    """Prompts without answers may be evaluated for their lengths and texts alone."""
    scored = Watched(none_if("b"))
    scored(**batch("a", "a"))
    for _ in range(12):
        scored(**batch("b", "b"), training=False)
    assert "NO USABLE REWARD" not in caplog.text
    for _ in range(9):
        scored(**batch("b", "b"))
        scored(**batch("a", "a"), training=False)
    with pytest.raises(RewardError, match="no completion got a reward in 10 consecutive batches: maybe"):
        scored(**batch("b", "b"))


def test_a_column_that_the_trainer_gives_itself_is_named_once_in_a_warning(caplog):
    hidden = ("completion", "completion_ids", "trainer_state", "log_metric", "log_extra")
    seen = []

    def reward(completions, completion_ids, **arguments):
        seen.append((completion_ids, set(arguments)))
        return [1.0]

    runner = RewardRunner(reward)
    columns = {name: ["column"] for name in (*hidden, "answer")} | {"prompt": ["p"]}
    for _ in range(2):
        runner(prompts=["p"], completions=["c"], completion_ids=[[1]], columns=columns)
    ids, names = seen[0]
    assert ids == [[1]] and names == {"prompts", "answer", "trainer_state", "log_metric", "log_extra"}
    warned = [record.getMessage() for record in caplog.records if "is not passed to reward functions" in record.message]
    assert [name for name in hidden if sum(f"{name!r} is not passed" in text for text in warned) == 1] == list(hidden)
    assert len(warned) == len(hidden) and "passes its own 'completions'" in warned[0]
