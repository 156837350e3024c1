"""Value functions on a policy's trunk or beside it, and language models that carry a value head in their checkpoint."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from posttrain import ModelError, Row
from posttrain.data.forest import Layout, collate
from posttrain.models.forward import forward
from posttrain.models.value_head import (
    ValueHead,
    attach_value,
    check_scorer,
    check_vocabulary,
    hidden_size,
    load_value_state,
    value_state,
    without_value,
)
from tests.conftest import build_model
from tests.wordings import raises

NEEDS = frozenset({"logp", "values"})


def lora(**settings):
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings)


def critic(policy, seed=5, labels=1):
    """A sequence classifier of the policy's shape and other weights."""
    torch.manual_seed(seed)
    settings = {k: v for k, v in policy.config.to_dict().items() if k not in ("num_labels", "id2label", "label2id")}
    return LlamaForSequenceClassification(LlamaConfig(**settings, num_labels=labels)).eval()


def forest(layout):
    rows = [
        Row([3, 4, 5], [[6, 7, 8, 0], [9, 10]], [[1, 1, 1, 0], [1, 1]]),
        Row([11, 12], [[13, 14, 15]], [[1, 1, 1]]),
    ]
    return rows, collate(rows, pad_token_id=0, layout=layout)


def by_completion(rows, batches, policy):
    """Values of every completion, in the order of the rows."""
    found = {}
    for batch in batches:
        out = forward(policy, batch, NEEDS)
        assert (out.values[batch.sequence < 0] == 0).all()
        for s, origin in enumerate(batch.origin):
            found[origin] = out.values[batch.sequence == s]
    return [found[i] for i in range(sum(len(row.completions) for row in rows))]


@pytest.mark.parametrize("layout", [Layout("tree", row_tokens=64), Layout("padded")], ids=["packed", "padded"])
def test_a_head_on_the_trunk_reads_the_state_before_each_token(tiny_model, layout):
    head = ValueHead(tiny_model.config)
    attach_value(tiny_model, head)
    rows, batches = forest(layout)
    found = iter(by_completion(rows, batches, tiny_model))
    for row in rows:
        for ids in row.completions:
            sequence = torch.tensor([row.prompt_ids + ids])
            hidden = tiny_model.model(sequence).last_hidden_state[0]
            expected = head(hidden)[len(row.prompt_ids) - 1 : -1, 0]
            assert torch.allclose(next(found), expected, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout("tree", row_tokens=64), Layout("padded")], ids=["packed", "padded"])
def test_a_second_model_reads_the_state_before_each_token(tiny_model, layout):
    value = critic(tiny_model)
    attach_value(tiny_model, value)
    rows, batches = forest(layout)
    found = iter(by_completion(rows, batches, tiny_model))
    for row in rows:
        for ids in row.completions:
            hidden = value.model(torch.tensor([row.prompt_ids + ids])).last_hidden_state[0]
            expected = value.score(hidden)[len(row.prompt_ids) - 1 : -1, 0]
            assert torch.allclose(next(found), expected, atol=1e-5)


def test_values_of_a_token_without_loss_are_there_and_log_probs_are_not(tiny_model):
    attach_value(tiny_model, ValueHead(tiny_model.config))
    tiny_model.eval()
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    out = forward(tiny_model, batch, NEEDS)
    extra = (batch.sequence >= 0) & ~batch.loss_mask
    assert int(extra.sum()) == 1
    assert (out.logp[extra] == 0).all()
    assert (out.values[extra] != 0).all()


def test_a_model_with_logits_of_its_own_gives_the_same_values(tiny_model):
    attach_value(tiny_model, ValueHead(tiny_model.config))
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    fast = forward(tiny_model, batch, NEEDS)
    tiny_model.own_logits = True
    slow = forward(tiny_model, batch, NEEDS)
    assert torch.allclose(fast.values, slow.values, atol=1e-6)
    assert torch.allclose(fast.logp, slow.logp, atol=1e-5)


def test_one_pass_of_the_trunk_gives_both(tiny_model):
    attach_value(tiny_model)
    calls = []
    tiny_model.model.register_forward_hook(lambda *_: calls.append(1))
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    forward(tiny_model, batch, NEEDS)
    assert len(calls) == 1


def test_values_have_gradients_in_head_and_trunk(tiny_model):
    attach_value(tiny_model, ValueHead(tiny_model.config))
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    forward(tiny_model, batch, NEEDS).values.sum().backward()
    assert tiny_model.v_head.summary.weight.grad.abs().sum() > 0
    assert tiny_model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_a_new_head_says_zero_everywhere(tiny_model):
    attach_value(tiny_model)
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    assert forward(tiny_model, batch, NEEDS).values.abs().max() == 0


def test_a_value_function_is_trained_with_the_policy_and_not_saved_with_it(tiny_model, tmp_path):
    before = set(tiny_model.state_dict())
    value = attach_value(tiny_model, critic(tiny_model))
    assert {id(p) for p in value.parameters()} <= {id(p) for p in tiny_model.parameters()}
    with without_value(tiny_model):
        assert set(tiny_model.state_dict()) == before
        tiny_model.save_pretrained(tmp_path)
    assert tiny_model.value_model is value


def test_the_value_function_comes_back_after_an_error(tiny_model):
    value = attach_value(tiny_model)
    with raises(RuntimeError), without_value(tiny_model):
        raise RuntimeError("boom")
    assert tiny_model.v_head is value


def test_a_value_state_round_trip(tiny_model, tiny_tokenizer):
    attach_value(tiny_model, ValueHead(tiny_model.config))
    state = value_state(tiny_model)
    assert set(state) == {"summary.weight", "summary.bias"}
    other = build_model(len(tiny_tokenizer))
    attach_value(other)
    load_value_state(other, state)
    assert torch.equal(other.v_head.summary.weight, tiny_model.v_head.summary.weight)
    with raises(ModelError):
        load_value_state(other, {"score.weight": torch.zeros(1, 32)})


def test_a_policy_with_adapters_keeps_its_head_on_the_base_model(tiny_model):
    from peft import get_peft_model

    policy = get_peft_model(tiny_model, lora())
    attach_value(policy)
    assert policy.get_base_model().v_head.summary.weight.requires_grad
    _, (batch,) = forest(Layout("tree", row_tokens=64))
    assert forward(policy, batch, NEEDS).values.shape == batch.input_ids.shape


@pytest.mark.parametrize("labels", [2])
def test_a_value_model_with_several_labels_is_refused(tiny_model, labels):
    with raises(ModelError, "value_model", "num_labels=2"):
        attach_value(tiny_model, critic(tiny_model, labels=labels))
    with raises(ModelError, "reward_model"):
        check_scorer(tiny_model, "reward_model")


def test_models_of_another_vocabulary_are_refused(tiny_model, tiny_tokenizer, tiny_model_dir, tmp_path):
    from transformers import AutoTokenizer

    scorer = critic(tiny_model)
    check_vocabulary(tiny_tokenizer, scorer, "reward_model")  # Nothing is known of its tokenizer.
    scorer.config._name_or_path = tiny_model_dir
    check_vocabulary(tiny_tokenizer, scorer, "reward_model")
    other = AutoTokenizer.from_pretrained(tiny_model_dir)
    other.add_tokens(["<pad>"])
    other.pad_token = "<pad>"  # Only the policy's tokenizer has it, and it is never scored.
    check_vocabulary(other, scorer, "reward_model")
    file = tmp_path / "tiny-model" / "tokenizer.json"
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    words["What"], words["The"] = words["The"], words["What"]
    file.write_text(json.dumps(content))
    with raises(ModelError):
        check_vocabulary(tiny_tokenizer, scorer, "reward_model")
    small = critic(build_model(40))
    with raises(ModelError, "40"):
        check_vocabulary(tiny_tokenizer, small, "value_model")


# Checkpoints with a head -----------------------------------------------------------------------------------------------


class Sizes:
    """Attributes as configs have them."""

    def __init__(self, **values):
        self.__dict__.update(values)


def test_the_hidden_size_is_looked_for_in_the_order_of_the_chapter():
    nested = {"text_config": Sizes(hidden_size=3), "decoder": Sizes(hidden_size=4)}
    assert hidden_size(Sizes(word_embed_proj_dim=1, hidden_size=2, **nested)) == 1
    assert hidden_size(Sizes(hidden_size=2, **nested)) == 2
    assert hidden_size(Sizes(**nested)) == 3
    assert hidden_size(Sizes(decoder=Sizes(hidden_size=4))) == 4
    with raises(ModelError, "word_embed_proj_dim"):
        hidden_size(Sizes())
