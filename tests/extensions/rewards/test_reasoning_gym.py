"""Tasks of reasoning-gym as datasets and rewards."""

from __future__ import annotations

import pytest

from posttrain import ConfigError, RewardError
from posttrain.extensions.rewards.reasoning_gym import extract_answer, reasoning_gym_task
from tests import forks
from tests.wordings import raises

gym = pytest.importorskip("reasoning_gym")


def test_one_line_gives_rows_and_a_reward_that_knows_the_right_answers():
    dataset, reward = reasoning_gym_task("chain_sum", size=20, seed=3, min_terms=2, max_terms=3)
    assert dataset.column_names == ["prompt", "answer", "task", "task_index"]
    assert len(dataset) == 20
    right = [[{"role": "assistant", "content": f"The answer is {a}."}] for a in dataset["answer"]]
    columns = {"task_index": dataset["task_index"], "answer": dataset["answer"]}
    assert reward(completions=right, **columns) == [1.0] * 20
    wrong = [f"{int(a) + 1}" for a in dataset["answer"]]
    assert max(reward(completions=wrong, **columns)) < 0.5
    assert reward(completions=[""] * 20, **columns) == [0.0] * 20
    assert reward.__name__ == "chain_sum"


def test_what_a_tool_said_last_is_no_answer_of_the_model():
    dataset, reward = reasoning_gym_task("chain_sum", size=1, seed=3)
    columns = {"task_index": dataset["task_index"], "answer": dataset["answer"]}
    tool = {"role": "tool", "content": dataset[0]["answer"]}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    assert reward(completions=[[called, tool]], **columns) == [0.0]
    said = {"role": "assistant", "content": f"The answer is {dataset[0]['answer']}."}
    assert reward(completions=[[said, tool, {"role": "assistant", "content": ""}]], **columns) == [1.0]


def test_answers_are_computed_here_and_agree():
    """An independent reading of the questions: sums and differences of a few numbers."""
    dataset, _ = reasoning_gym_task("chain_sum", size=50, min_terms=2, max_terms=4, allow_negation=False)
    for row in dataset:
        expression = row["prompt"][-1]["content"].rpartition(":")[2].replace("=", "").strip()
        assert str(eval(expression)) == row["answer"], expression


def test_neighbouring_seeds_share_no_rows():
    rows = [reasoning_gym_task("chain_sum", size=200, seed=s, min_digits=4, max_digits=4)[0] for s in (0, 1)]
    questions = [{row["prompt"][-1]["content"] for row in part} for part in rows]
    assert not questions[0] & questions[1]
    plain = [gym.create_dataset("chain_sum", size=200, seed=s, min_digits=4, max_digits=4) for s in (0, 1)]
    assert plain[0][1]["question"] == plain[1][0]["question"], "the trap is gone: the spacing may go too"


def test_the_same_call_gives_the_same_rows():
    first, second = (reasoning_gym_task("leg_counting", size=10, seed=5)[0] for _ in range(2))
    assert first.to_list() == second.to_list()


def test_a_mixture_scores_each_row_by_its_own_task():
    mixture = {"chain_sum": 2.0, "leg_counting": {"weight": 1.0, "max_animals": 3}, "spell_backward": 1.0}
    dataset, reward = reasoning_gym_task(mixture, size=60, seed=1, system_prompt="Be brief.")
    assert set(dataset["task"]) == set(mixture)
    assert dataset[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    columns = {"task_index": dataset["task_index"], "answer": dataset["answer"]}
    assert reward(completions=[f"<answer>{a}</answer>" for a in dataset["answer"]], **columns) == [1.0] * 60
    scores = reward(completions=["<answer>zzz</answer>"] * 60, **columns)
    assert max(scores) < 0.5
    assert len({row["prompt"][-1]["content"] for row in dataset}) > 50


def test_a_mixture_of_another_seed_shares_no_rows_either():
    mixture = {"chain_sum": {"min_digits": 4, "max_digits": 4}, "spell_backward": {"min_word_len": 9}}
    rows = [reasoning_gym_task(mixture, size=100, seed=s)[0] for s in (0, 1, 2)]
    sums = [{r["prompt"][-1]["content"] for r in part if r["task"] == "chain_sum"} for part in rows]
    assert not sums[0] & sums[1] and not sums[1] & sums[2] and not sums[0] & sums[2]


def test_the_reward_of_another_dataset_is_refused():
    dataset, _ = reasoning_gym_task("chain_sum", size=5, seed=0)
    _, other = reasoning_gym_task("chain_sum", size=5, seed=1)
    with raises(RewardError, "reasoning_gym_task"):
        other(completions=["1"] * 5, task_index=dataset["task_index"], answer=dataset["answer"])


def test_a_scorer_that_raises_on_what_a_model_wrote_counts_zero():
    dataset, reward = reasoning_gym_task("leg_counting", size=1)

    def boom(answer, entry):
        raise ValueError("unreadable")

    reward.task.score_answer = boom
    assert reward(completions=["x"], task_index=[0], answer=dataset["answer"]) == [0.0]


@pytest.mark.parametrize(
    ("text", "how", "answer"),
    [
        ("<answer>1</answer> or <answer> 2 </answer>", "auto", "2"),
        ("so \\boxed{\\frac{1}{2}} holds", "auto", "\\frac{1}{2}"),
        ("Let me see.\nThe answer is: **12**.", "auto", "12"),
        ("Let me see.\n 12 ", "auto", "12"),
        ("", "auto", None),
        ("no tag", "tag", None),
        ("3 legs and -1,204.5 more", "last_number", "-1204.5"),
        ("none", "last_number", None),
        ("  all of it ", "text", "all of it"),
    ],
)
def test_answers_are_found(text, how, answer):
    assert extract_answer(text, how) == answer


def test_extraction_may_be_a_function_and_is_logged():
    dataset, reward = reasoning_gym_task("chain_sum", size=2, extract=lambda text: text.split("#")[-1])
    logged = {}
    columns = {"task_index": dataset["task_index"], "answer": dataset["answer"]}
    scores = reward(completions=[f"x#{a}" for a in dataset["answer"]], log_extra=logged.__setitem__, **columns)
    assert scores == [1.0, 1.0]
    assert logged == {"answer_found": dataset["answer"][:]}


def test_mistakes_are_named():
    for call, message in [
        (
            lambda: reasoning_gym_task("chain_som"),
            r"'chain_som' is not a task of reasoning-gym \(did you mean 'chain_sum'",
        ),
        (lambda: reasoning_gym_task("chain_sum", legs=3), "rejects these settings of chain_sum: .*legs"),
        (lambda: reasoning_gym_task("chain_sum", min_terms=0), "rejects these settings"),
        (lambda: reasoning_gym_task({"chain_sum": 1.0}, min_terms=2), "apply to one task, but task is a mixture"),
        (lambda: reasoning_gym_task({}), "is empty"),
        (lambda: reasoning_gym_task("chain_sum", size=0), "size=0"),
        (lambda: reasoning_gym_task("chain_sum", extract="tags"), r"did you mean 'tag'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()


def test_without_the_package_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "from posttrain.extensions.rewards.reasoning_gym import reasoning_gym_task\n"
        "try: reasoning_gym_task('chain_sum')\n"
        "except ImportError as e: print(e)"
    )
    out = forks.run(["-c", code]).stdout
    assert 'pip install "posttrain[reasoning-gym]"' in out
