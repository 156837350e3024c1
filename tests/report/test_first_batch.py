"""The first step as the model sees it, written once for the report."""

import json

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.data.forest import collate
from posttrain.extensions.page.build import render
from posttrain.extensions.page.run import read_run
from posttrain.loop.data_report import describe_batches
from posttrain.types import Row


def test_sequences_show_which_tokens_are_trained(tiny_tokenizer):
    encode = lambda text: tiny_tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    prompt, one, two = encode("What is the sum?"), encode("The answer is 3"), encode("number")
    rows = [Row(prompt, [one, two], [[1] * len(one), [0] + [1] * (len(two) - 1)])]
    found = describe_batches(collate(rows, pad_token_id=0), tiny_tokenizer)
    assert found["lengths"] == [len(prompt) + len(one), len(prompt) + len(two)]
    assert found["facts"]["tokens computed"] == len(prompt) + len(one) + len(two)
    assert found["facts"]["tokens of all sequences"] == 2 * len(prompt) + len(one) + len(two)
    assert found["facts"]["tokens trained"] == len(one) + len(two) - 1
    assert found["sequences"][0]["pieces"] == [["What is the sum?", False], ["The answer is 3", True]]
    assert "".join(text for text, _ in found["sequences"][1]["pieces"]) == "What is the sum?number"


def test_a_run_writes_it_once_and_the_page_shows_it(tiny_model, tiny_tokenizer, tmp_path):
    config = SFTConfig(str(tmp_path), max_steps=2, report_to="none", completion_only_loss=True)
    data = Dataset.from_list([{"prompt": "What is the sum?", "completion": " The answer is 3"}] * 16)
    SFTTrainer(tiny_model, args=config, train_dataset=data, processing_class=tiny_tokenizer).train()
    seen = json.loads((tmp_path / "data.json").read_text(encoding="utf-8"))
    assert seen["facts"]["sequences"] == 8
    assert " The answer is 3" in seen["sequences"][0]["pieces"][1][0]
    assert "What is the sum?" in render([read_run(tmp_path)])


def test_one_group_of_each_generation_keeps_its_tokens_log_probs(tiny_model, tiny_tokenizer, tmp_path):
    config = GRPOConfig(
        str(tmp_path), max_steps=1, report_to="none", per_device_train_batch_size=8, num_generations=4,
        max_completion_length=5, learning_rate=0.0,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(4)])
    reward = lambda completions, **_: [float(len(set(text))) for text in completions]  # noqa: E731
    GRPOTrainer(tiny_model, reward, config, train_dataset=data, processing_class=tiny_tokenizer).train()
    samples = read_run(tmp_path).samples
    shaded = [s for _, groups in samples for group in groups for s in group if s.logps]
    assert len(shaded) == 4
    assert all(len(s.tokens) == len(s.logps) > 0 for s in shaded)
