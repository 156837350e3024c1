"""A reward model as a reward function: the same numbers as the classifier itself, and no silent fault."""

import logging

import pytest
import torch

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.errors import ConfigError, ModelError, RewardError
from posttrain.models.load import load_classifier
from posttrain.rewards.model import ModelReward
from posttrain.rewards.runner import RewardRunner
from tests.wordings import raises


def build(vocabulary, labels=1, seed=0, **settings):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.2,
        num_labels=labels,
        **settings,
    )
    return LlamaForSequenceClassification(config).eval()


@pytest.fixture
def judge(tiny_tokenizer):
    return ModelReward(build(len(tiny_tokenizer)), tiny_tokenizer, batch_size=2)


PROMPTS = ["What is", "The sum", "A", "two numbers and"]
TEXTS = [" 42?", " of two numbers is a number", " is", " the answer"]


def test_a_score_is_the_classifier_s_output_of_the_bare_text(judge, tiny_tokenizer):
    expected = []
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        ids = torch.tensor([tiny_tokenizer(prompt + text, add_special_tokens=False)["input_ids"]])
        hidden = judge.model.model(ids).last_hidden_state[0, -1]
        expected.append(float(judge.model.score(hidden)[0]))
    assert judge(prompts=PROMPTS, completions=TEXTS) == pytest.approx(expected, abs=1e-5)


def test_sub_batches_and_order_do_not_change_a_score(judge):
    together = judge(prompts=PROMPTS, completions=TEXTS)
    judge.batch_size = 1
    alone = judge(prompts=PROMPTS[::-1], completions=TEXTS[::-1])[::-1]
    assert together == pytest.approx(alone, abs=1e-5)


def test_r29_a_text_that_ends_in_the_pad_token_is_read_at_its_end(judge, tiny_tokenizer):
    """Pad is eos here: an id comparison would read the token before it, and both texts would score the same."""
    bare, ended = judge(prompts=["x", "x"], completions=["yes", "yes<|im_end|>"])
    assert bare != ended


def test_r29_texts_beyond_the_context_lose_their_beginning(judge, caplog):
    scores = judge(prompts=["a" * 400, "b" * 400], completions=[" and so on", " and so on"])
    assert scores[0] != scores[1]
    long = "b" * 400 + " and so on"
    ids = judge.tokenizer(long, add_special_tokens=False)["input_ids"][-128:]
    hidden = judge.model.model(torch.tensor([ids])).last_hidden_state[0, -1]
    assert scores[1] == pytest.approx(float(judge.model.score(hidden)[0]), abs=1e-5)
    assert "reads at most 128 tokens, so longer texts lose their beginning (1 texts so far)" in caplog.text


def test_a_folder_is_loaded_with_the_given_keywords_and_the_caller_s_dict_stays(tiny_tokenizer, tmp_path):
    build(len(tiny_tokenizer)).save_pretrained(tmp_path / "judge")
    tiny_tokenizer.save_pretrained(tmp_path / "judge")
    options = {"model_init_kwargs": {"dtype": "bfloat16"}, "trust_remote_code": False, "batch_size": 3}
    names = [str(tmp_path / "judge")]
    one, two = RewardRunner(names, model_options=options), RewardRunner(names, model_options=options)
    assert options["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert names == [str(tmp_path / "judge")]
    assert one.functions[0].model.dtype == torch.bfloat16
    assert one.functions[0].batch_size == 3
    assert one.functions[0].model is not two.functions[0].model
    assert one.names == ["judge"]


def test_the_start_places_the_model_and_shows_its_scores(judge, caplog):
    caplog.set_level(logging.INFO)
    runner = RewardRunner(judge)
    judge.model.to(torch.float64)
    runner.start(torch.device("cpu"))
    assert "answers to 'What is 6 times 7?': 'Yes.'" in caplog.text


def test_r29_a_head_that_says_the_same_of_everything_is_an_error(judge):
    with torch.no_grad():
        judge.model.score.weight.zero_()
    with raises(RewardError, "0", "4"):
        judge.probe()
    with raises(RewardError, "0", "4"):
        judge(prompts=PROMPTS, completions=TEXTS)


def test_a_classifier_of_several_labels_and_a_missing_folder_are_refused(tiny_tokenizer, tmp_path):
    with raises(ModelError, "num_labels=1", "3"):
        ModelReward(build(len(tiny_tokenizer), labels=3), tiny_tokenizer)
    with raises(ModelError):
        RewardRunner(torch.nn.Linear(2, 1))
    with raises(ModelError):
        ModelReward(str(tmp_path / "none"))


def test_a_checkpoint_without_a_head_is_refused_because_its_scores_would_be_random(tiny_model_dir):
    with raises(ModelError, "score.weight", "random"):
        ModelReward(tiny_model_dir)


def test_a_model_built_in_memory_reads_the_tokenizer_of_the_policy(tiny_tokenizer, tmp_path):
    from tests.methods.helpers import prompts

    args, small = GRPOConfig(str(tmp_path), use_cpu=True, report_to="none"), build(len(tiny_tokenizer) - 1)
    given = {"reward_funcs": small, "train_dataset": prompts(), "args": args}
    for tokenizer in (None, tiny_tokenizer):
        with raises(ConfigError, "reward_processing_classes=tokenizer"):
            GRPOTrainer("a folder that is not there", **given, processing_class=tokenizer)
    reward = RewardRunner(build(len(tiny_tokenizer)), model_options={"policy_tokenizer": tiny_tokenizer}).functions[0]
    assert reward.tokenizer is tiny_tokenizer


def test_tool_calls_that_the_template_cannot_show_are_refused(judge):
    call = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    with raises(RewardError):
        judge(prompts=[[{"role": "user", "content": "x"}]], completions=[call])


def test_an_encoder_pools_as_it_was_trained_to(tiny_tokenizer):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tiny_tokenizer), num_labels=1, initializer_range=0.3, **settings)
    model = BertForSequenceClassification(config).eval()
    judge = ModelReward(model, tiny_tokenizer)
    ids = torch.tensor([tiny_tokenizer("The sum of two", add_special_tokens=False)["input_ids"]])
    assert judge(prompts=["The sum"], completions=[" of two"]) == pytest.approx([float(model(ids).logits)], abs=1e-5)


def test_a_reward_model_with_an_adapter_scores_as_its_forward_method(tiny_tokenizer, tiny_model_dir):
    import peft

    model = load_classifier(tiny_model_dir, num_labels=1)
    model.config.pad_token_id = tiny_tokenizer.pad_token_id
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    texts = ["one and two", "three"]
    ids = [tiny_tokenizer(text)["input_ids"] for text in texts]
    truth = [float(adapted(input_ids=torch.tensor([row])).logits) for row in ids]
    assert ModelReward(adapted, tiny_tokenizer)(["", ""], texts) == pytest.approx(truth, abs=1e-5)
