"""Are chosen answers really better? Asked of real runs, by a reward model; and do policy and reference begin alike?"""

from __future__ import annotations

import json
import math
import random

import datasets
import pytest
import torch

from posttrain import ConfigError
from posttrain.rewards.model import ModelReward
from tests.faults.build import scorer
from tests.methods.test_dpo import dpo
from tests.methods.test_judged import make
from tests.wordings import raises

GOOD, BAD = ["sum", "two", "number"], ["user", "system", "tool"]


def pairs(count, flipped=()):
    """Answers of good words and of bad ones; some pairs the wrong way round."""
    rows = []
    for i in range(count):
        rng = random.Random(i)
        good, bad = (" ".join(rng.choices(words, k=rng.randrange(3, 6))) for words in (GOOD, BAD))
        chosen, rejected = (bad, good) if i in flipped else (good, bad)
        rows.append({"prompt": f"What is {i}? ", "chosen": chosen, "rejected": rejected})
    return datasets.Dataset.from_list(rows)


def findings(folder, code):
    path = folder / "findings.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["code"] == code]


def suspects(folder):
    path = folder / "suspect_pairs.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_in_bfloat16_policy_and_reference_are_computed_alike_and_neither_in_float32(tiny_tokenizer, tmp_path):
    """Accelerate puts autocast around the forward of the policy, which must reach the layers and the head."""
    seen = set()
    trainer = dpo(tmp_path, tiny_tokenizer, data=pairs(16), bf16=True, max_steps=2, learning_rate=0.0)
    for model in (trainer.model, trainer.reference.copy):
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *call: seen.add(str(call[2].dtype)))
    trainer.train()
    assert seen == {"torch.bfloat16"}
    first = trainer.state.log_history[0]
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0 and abs(first["loss"] - math.log(2)) < 1e-6
    assert findings(tmp_path, "PT-P001") == []


@pytest.fixture
def judge(tiny_tokenizer, tmp_path):
    """A folder with a reward model, and pairs that it judges as they are labelled."""
    folder = tmp_path / "judge"
    model = scorer(tiny_tokenizer)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    score = ModelReward(str(folder))
    rows = []
    for row in pairs(60):
        first, second = score([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
        rows.append(row if first > second else row | {"chosen": row["rejected"], "rejected": row["chosen"]})
    return str(folder), rows


def test_a_reward_model_that_agrees_is_written_down_and_one_that_does_not_is_told(
    judge, tiny_tokenizer, tmp_path, caplog
):
    folder, rows = judge
    agrees = dpo(tmp_path / "a", tiny_tokenizer, data=datasets.Dataset.from_list(rows), pair_reward_model=folder)
    ((finding, _),) = agrees.preflight.results["PT-D036"].findings.values()
    assert finding.severity == "info" and "in 60 of 60 pairs (100 %)" in finding.what and "PT-D036" not in caplog.text
    assert suspects(tmp_path / "a") == []
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:50]] + rows[50:]
    dpo(tmp_path / "b", tiny_tokenizer, data=datasets.Dataset.from_list(swapped), pair_reward_model=folder)
    assert f"PT-D036: {folder} prefers the chosen answer in 10 of 60 pairs (17 %)" in caplog.text
    assert "labels may be inverted" in caplog.text
    assert [row["row"] for row in suspects(tmp_path / "b")] == list(range(50))


def test_conversations_are_judged_by_the_reward_models_template(judge, tiny_tokenizer, tmp_path):
    folder, rows = judge
    talks = [
        {
            side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for side in ("chosen", "rejected")
        }
        for row in rows
    ]
    trainer = dpo(tmp_path / "a", tiny_tokenizer, data=datasets.Dataset.from_list(talks), pair_reward_model=folder)
    score = ModelReward(folder)
    prompts = [talk["chosen"][:1] for talk in talks]
    good, bad = (score(prompts, [talk[side][1:] for talk in talks]) for side in ("chosen", "rejected"))
    right = sum(a > b for a, b in zip(good, bad, strict=True))
    ((finding, _),) = trainer.preflight.results["PT-D036"].findings.values()
    assert f"in {right} of 60 pairs" in finding.what


def test_a_reward_model_needs_pairs(judge, tiny_tokenizer, tmp_path):
    with raises(ConfigError, "'chosen'", "'rejected'"):
        make("kto", tmp_path / "a", tiny_tokenizer, pair_reward_model=judge[0])
