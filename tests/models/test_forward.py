"""One forward over a forest equals each sequence alone, on every backend that takes a mask, for several families."""

import copy
from dataclasses import replace

import peft
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from posttrain.data.forest import Layout, collate, split_by_sequence
from posttrain.errors import ModelError
from posttrain.models import attention
from posttrain.models.architecture import attention_name
from posttrain.models.attention import coarsest_dtype
from posttrain.models.forward import forward, sequence_logps
from posttrain.models.heads import cast_head_to_fp32, causal_lm, install_token_head
from posttrain.models.neftune import inverse_lengths, noisy_embeddings
from posttrain.models.probe import probe_key, probe_layout
from posttrain.models.reference import create_reference_model
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Row
from tests.conftest import build_model
from tests.models.architectures import built
from tests.wordings import raises

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 6},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "phi3": {},
}


def test_a_verdict_is_of_a_class_and_not_of_its_name():
    """Code that comes with a model may have the name of another's, and its config."""
    model, other = build_model(97), build_model(97)
    assert probe_key(model) == probe_key(other)
    other.__class__ = type(type(model).__name__, (type(model),), {"__module__": "remote"})
    assert probe_key(model) != probe_key(other)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_deep_copy_of_a_model_that_was_used_computes_with_its_own_weights(wrapped):
    """As a user makes a reference of a policy: one that ran the policy's layers would follow it, and no loss would tell."""
    model = build_model(97)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])) if wrapped else model
    (batch,) = collate([Row([5, 6, 7], [[8, 9]], [[1, 1]])], pad_token_id=0)
    before = forward(model, batch).logp
    for twin in (copy.deepcopy(model), create_reference_model(model)):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(1.5)
        assert not torch.allclose(forward(twin, batch).logp, before, atol=1e-3)
        assert not torch.allclose(
            twin(input_ids=batch.input_ids).logits, model(input_ids=batch.input_ids).logits, atol=1e-3
        )
    assert torch.equal(forward(model, batch).logp, before)
    inner = causal_lm(model)
    inner.forward = torch.autocast("cpu", dtype=torch.bfloat16)(inner.forward)  # As accelerate prepares it.
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(forward(twin, batch).logp, before, atol=0.1)
    assert torch.allclose(forward(model, batch).logp, before, atol=0.1)


def family(name, implementation="sdpa"):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**SMALL, **FAMILIES[name], initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()


def rows(vocab=97):
    g = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(3, vocab, (n,), generator=g).tolist()

    def make(prompt, *lengths):
        return Row(ids(prompt), [ids(n) for n in lengths], [[1] * n for n in lengths])

    return [make(9, 4, 7, 1), make(5, 8), make(0, 12), make(3, 2, 2)]


# transformers offers no sdpa for gemma2, whose attention is capped.
CASES = [(name, how) for name in FAMILIES for how in ("sdpa", "eager") if (name, how) != ("gemma2", "sdpa")]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_tree_packed_and_padded_equal_each_sequence_alone(name, implementation):
    model, examples = family(name, implementation), rows()
    truth = sequence_logps(model, examples)
    for layout in (Layout("tree", row_tokens=64), Layout("tree", row_tokens=20), Layout("padded", row_tokens=64)):
        for batch in collate(examples, pad_token_id=0, layout=layout):
            out = forward(model, batch, frozenset({"logp", "entropy", "correct"}))
            assert (out.entropy[batch.loss_mask] > 0).all()
            for origin, logp in zip(batch.origin, split_by_sequence(out.logp, batch), strict=True):
                assert torch.allclose(logp, truth[origin], atol=1e-4), (layout, origin)


def test_gradients_of_tree_and_padded_agree():
    grads = []
    for layout in (Layout("tree", row_tokens=64), Layout("padded", row_tokens=64)):
        model = build_model(97)
        for batch in collate(rows(), pad_token_id=0, layout=layout):
            (forward(model, batch).logp.square().sum()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    # Sums in another order: 1e-6 of the largest was seen on AVX2, where an absolute 1e-4 is below the rounding of 200.
    assert (grads[0] - grads[1]).abs().max() < 2e-6 * grads[0].abs().max()


def test_padding_content_changes_nothing():
    model = build_model(97)
    (batch,) = collate(rows()[:1], pad_token_id=0, layout=Layout("padded", row_tokens=64))
    before = forward(model, batch).logp
    batch.input_ids[~batch.real] = 55
    assert torch.equal(before, forward(model, batch).logp)


def test_temperature_divides_the_logits():
    model = build_model(97)
    (batch,) = collate(rows()[1:2], pad_token_id=0)
    hot = forward(model, batch, temperature=2.0).logp
    logits = model(batch.input_ids).logits[0] / 2.0
    expected = torch.log_softmax(logits, -1)[4:-1].gather(1, batch.input_ids[0, 5:, None]).squeeze(1)
    assert torch.allclose(hot[0, 5:], expected, atol=1e-5)


def test_an_adapter_on_the_head_is_not_dropped():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build_model(97, tie_word_embeddings=False), LoraConfig(target_modules=["lm_head"], r=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    (batch,) = collate(rows()[1:2], pad_token_id=0)
    logits = model(input_ids=batch.input_ids).logits[0]
    expected = torch.log_softmax(logits, -1)[4:-1].gather(1, batch.input_ids[0, 5:, None]).squeeze(1)
    assert torch.allclose(forward(model, batch).logp[0, 5:], expected, atol=1e-5)


def test_rows_of_tokens_that_are_trained_beside_an_adapter_count_in_a_tied_head():
    """peft keeps them beside the matrix that embeddings and head share; training reads what it says with them."""
    from peft import LoraConfig, get_peft_model

    (batch,) = collate(rows()[1:2], pad_token_id=0)
    tokens = sorted(set(batch.input_ids[0, 5:8].tolist()))
    config = LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices={"embed_tokens": tokens})
    model = get_peft_model(build_model(97), config)
    (trained,) = [p for name, p in model.named_parameters() if "trainable_tokens_delta" in name]
    with torch.no_grad():
        trained.normal_()

    def expected():
        logps = torch.log_softmax(model(input_ids=batch.input_ids).logits[0], -1)
        return logps[4:-1].gather(1, batch.input_ids[0, 5:, None]).squeeze(1)

    found, wanted = forward(model, batch).logp[0, 5:], expected()
    assert torch.allclose(found, wanted, atol=1e-5)
    ours, theirs = (torch.autograd.grad(logps.sum(), trained)[0] for logps in (found, wanted))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.abs().max() > 0.1
    with model.disable_adapter():
        assert torch.allclose(forward(model, batch).logp[0, 5:], expected(), atol=1e-5)


def test_the_probe_accepts_a_llama_and_keeps_its_verdict():
    attention.PROBED.clear()
    assert probe_layout(build_model(97)).kind == "tree"
    assert len(attention.PROBED) == 1


def test_the_probe_goes_by_the_weights_that_round_most():
    """A float32 output layer tied to the embeddings is the first parameter, and its layers are bfloat16."""
    model = build_model(97, tie_word_embeddings=True).bfloat16()
    cast_head_to_fp32(model)
    assert next(model.parameters()).dtype == torch.float32
    assert coarsest_dtype(model) == torch.bfloat16
    assert probe_layout(model).kind == "tree"
    assert not NativeEngine(model, pad_token_id=0).capabilities.logprobs_match_training
    assert NativeEngine(model.float(), pad_token_id=0).capabilities.logprobs_match_training


def test_the_probe_sends_a_model_that_ignores_masks_to_padded_rows(caplog):
    attention.PROBED.clear()
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mamba"](vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert probe_layout(model).kind == "padded"
    assert "padded rows" in caplog.text
    truth = sequence_logps(model, rows()[:2])
    for batch in collate(rows()[:2], pad_token_id=0, layout=Layout("padded", row_tokens=64)):
        for origin, logp in zip(batch.origin, split_by_sequence(forward(model, batch).logp, batch), strict=True):
            assert torch.allclose(logp, truth[origin], atol=1e-4)


def noise_of(model, batch, alpha, times=60):
    """Standard deviation of what training adds to each token's embedding, ``(B, T)``, by many draws."""
    embeddings, seen = model.get_input_embeddings(), []
    plain = embeddings(batch.input_ids).detach()
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model.train()
    with noisy_embeddings(model, alpha) as noisy, torch.no_grad():
        for _ in range(times):
            noisy(model, batch)
    hook.remove()
    return (torch.stack(seen) - plain).square().mean((0, 3)).sqrt()


LAYOUTS = {
    "tree": Layout("tree", row_tokens=20),
    "packed in one row": Layout("tree", row_tokens=64),
    "padded": Layout("padded", row_tokens=64),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_noise_on_embeddings_goes_by_each_documents_length(layout):
    """Uniform in alpha / sqrt(L d) has the standard deviation alpha / sqrt(3 L d), L being the prompt with one completion."""
    examples, alpha, size = rows(), 5.0, 32
    lengths = [len(row.prompt_ids) + len(c) for row in examples for c in row.completions]
    for batch in collate(examples, pad_token_id=0, layout=layout):
        found = noise_of(build_model(97), batch, alpha)
        for number, origin in enumerate(batch.origin):
            expected = alpha / (3 * lengths[origin] * size) ** 0.5
            own = batch.sequence == number
            assert found[own].mean() == pytest.approx(expected, rel=0.03)
            b, leaf = own.nonzero()[0, 0], batch.leaves[number]
            prompt = torch.zeros_like(batch.real[b])
            for run in batch.path(number):
                prompt[run.start : run.stop] = batch.sequence[b, run.start : run.stop] < 0
            if batch.segments[leaf.segment].parent < 0 and prompt.any():
                assert found[b][prompt].mean() == pytest.approx(expected, rel=0.03)
        assert (found[~batch.real] == 0).all()


def test_a_shared_prompt_has_the_mean_variance_of_its_documents():
    (batch,) = collate(rows()[:1], pad_token_id=0, layout=Layout("tree", row_tokens=64))
    shared = (1 / 13 + 1 / 16 + 1 / 10) / 3
    assert torch.allclose(inverse_lengths(batch)[0, :9], torch.tensor(shared))


def test_scores_with_a_bound_are_not_computed_by_sdpa_which_ignores_it(caplog):
    """transformers 5.17 loads Gemma 2 with sdpa."""
    model = built("gemma2")
    model.set_attn_implementation("eager")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        expected = model(ids).logits
        model.config._attn_implementation_internal = "sdpa"
        install_token_head(model)
        assert torch.equal(model(ids).logits, expected)
    assert attention_name(model.config) == "eager" and "attn_logit_softcapping=50.0" in caplog.text
    assert probe_layout(model).kind == "tree"


def test_the_balance_of_routers_is_zero_without_a_router_and_refused_without_their_logits(monkeypatch):
    """transformers 5.17 returns none for Granite."""
    (batch,) = collate(rows(), pad_token_id=0, layout=Layout("padded", row_tokens=4096), together=True)
    assert float(forward(built("llama4"), batch, frozenset({"aux"})).aux_loss) == 0
    model = built("qwen3 moe")
    assert float(forward(model, batch, frozenset({"aux"})).aux_loss) > 0
    run = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda *args, **named: replace(run(*args, **named), router_logits=None))
    with raises(ModelError, "Qwen3MoeForCausalLM"):
        forward(model, batch, frozenset({"aux"}))
