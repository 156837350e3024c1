"""Traps of training: each test builds the situation that went silently wrong for users, and is named after its number."""

import logging

import datasets
import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig

from posttrain import ConfigError, ModelConfig, ModelError, get_peft_config, get_quantization_config
from posttrain.data.forest import Layout, collate
from posttrain.extensions.trl_helpers.bema import BEMACallback
from posttrain.extensions.trl_helpers.completions import EvalPrompts
from posttrain.loop.checks import check_first_gradients
from posttrain.metrics import MetricBuffer, mean, minimum
from posttrain.models import attention, parallel, probe
from posttrain.models.forward import forward, install_token_head, sequence_logps
from posttrain.models.load import (
    check_model_source,
    create_model_from_path,
    mirror_eos,
    resolve_pad_token,
    wrap_with_peft,
)
from posttrain.models.logprob import token_logprobs
from posttrain.models.memory import OffloadActivations
from posttrain.models.reference import Reference, create_reference_model, disable_dropout_in_model
from posttrain.types import Row
from tests.conftest import build_model, build_tokenizer, scale_logits, told_of_calls
from tests.methods.helpers import chats, grpo, losses, sft, weights
from tests.methods.test_reward import alone, reward, scorer
from tests.wordings import raises

LORA = {"r": 4, "target_modules": ["q_proj"]}
ROWS = [Row([5, 6, 7], [[8, 9, 10, 11]], [[1] * 4])]


def logps(model, rows=ROWS):
    """Log-probs of the completions by the forward that trains."""
    (batch,) = collate(rows, pad_token_id=0, layout=Layout("padded"))
    with torch.no_grad():
        return forward(model, batch).logp[batch.loss_mask]


def moved(model, seed=3):
    """The same model with its weights (or its adapter's) changed after loading."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


# Adapters, references, vocabulary -------------------------------------------------------------------------------------


def test_trap_37_an_adapter_gets_gradients_through_checkpointed_layers():
    """Frozen embeddings cut the graph before the first checkpointed layer, unless what comes out of them wants a gradient."""
    ids = torch.tensor([[5, 6, 7]])
    model = wrap_with_peft(build_model(97), peft.LoraConfig(**LORA), activation_checkpointing=True)
    assert not model.get_input_embeddings().weight.requires_grad
    assert model.get_input_embeddings()(ids).requires_grad
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    norms = {
        n: None if p.grad is None else float(p.grad.norm()) for n, p in model.named_parameters() if p.requires_grad
    }
    assert check_first_gradients(norms) is None
    assert check_first_gradients(dict.fromkeys(norms)).code == "PT-B003"


def test_trap_38_a_pattern_that_matches_nothing_does_not_freeze_the_model(tiny_model):
    with raises(ModelError, "1"):
        create_reference_model(tiny_model, num_shared_layers=1, pattern="modle.layers.{layer}")
    with raises(ModelError):
        create_reference_model(tiny_model, num_shared_layers=99)
    assert all(parameter.requires_grad for parameter in tiny_model.parameters())


def test_trap_38_shared_layers_are_whole_path_components_and_the_rest_trains_on(caplog):
    model = build_model(97, num_hidden_layers=12, tie_word_embeddings=False)
    reference = create_reference_model(model, num_shared_layers=1)
    frozen = {name.split(".")[2] for name, p in model.named_parameters() if not p.requires_grad and "layers" in name}
    assert frozen == {"0"}  # Not layers 10 and 11, whose names begin like layer 1.
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    shared = {name for name in ours if ours[name] is theirs[name]}
    assert shared == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert not any(p.requires_grad for p in reference.parameters())
    create_reference_model(build_model(97), num_shared_layers=1)
    assert "the output layer is tied to the shared embeddings" in caplog.text


@pytest.mark.parametrize("kind", ["given weights", "trained adapter", "fresh adapter"])
def test_trap_39_policy_and_reference_are_equal_at_step_zero(kind):
    """A model that was changed after loading, in bfloat16, and adapters that came trained or new."""
    model = moved(build_model(97)).bfloat16()
    if kind == "trained adapter":
        model = moved(peft.get_peft_model(model, peft.LoraConfig(**LORA)))
    elif kind == "fresh adapter":
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    before = logps(model)
    reference = Reference(model, fresh_adapter=kind == "fresh adapter")
    with reference.active(model) as other:
        assert torch.equal(logps(other), before)
        assert {p.dtype for p in other.parameters()} == {p.dtype for p in model.parameters()}
    moved(model, seed=4)
    assert not torch.equal(logps(model), before)
    with reference.active(model) as other:
        assert torch.equal(logps(other), before)


class Wrapped(torch.nn.Module):
    """As data parallelism wraps a model: what it is lies one level deeper."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("fresh", [True, False])
def test_trap_40_a_wrapper_does_not_hide_the_adapter_from_the_reference(fresh):
    """Unseen, a fresh adapter would stay on in the reference, and its log-probs would be the policy's own."""
    base = build_model(97)
    before = logps(base)
    model = peft.get_peft_model(base, peft.LoraConfig(**LORA))
    if not fresh:
        before = logps(moved(model))
    reference = Reference(Wrapped(model), fresh_adapter=fresh)
    assert reference.copy is None
    moved(model, seed=4)
    with reference.active(Wrapped(model)) as other:
        assert torch.equal(logps(other), before)
    assert not torch.equal(logps(model), before)


def test_trap_40_cached_reference_log_probs_have_a_key_of_everything_that_moves_them():
    from types import SimpleNamespace

    from posttrain.loop import precompute

    model, other = build_model(97), build_model(97)
    rows = datasets.Dataset.from_dict({"prompt_ids": [[1, 2]]})

    def key(**changes):
        options = {
            "model": model,
            "rows": rows,
            "options": {"max_length": 8},
            "precision": "no",
            "adapter": None,
        } | changes
        trainer = SimpleNamespace(
            model=options["model"], accelerator=SimpleNamespace(mixed_precision=options["precision"]),
            layout=Layout("padded"), tokenizer=SimpleNamespace(chat_template=None), method=SimpleNamespace(reference_key=lambda: options["options"]),
        )  # fmt: skip
        reference = SimpleNamespace(copy=None, adapter=options["adapter"])
        return precompute._cache(trainer, options["rows"], reference, ["a"]).name

    assert key() == key(model=other)  # Equal weights are the same reference, whatever object holds them.
    moved(other)
    others = [
        {"model": other},
        {"rows": datasets.Dataset.from_dict({"prompt_ids": [[1, 3]]})},
        {"options": {"max_length": 9}},
        {"precision": "bf16"},
        {"adapter": "ref"},
    ]
    assert len({key(), *(key(**change) for change in others)}) == 1 + len(others)


def test_trap_41_an_adapter_on_the_head_is_trained(tiny_tokenizer, tmp_path):
    model = build_model(len(tiny_tokenizer), tie_word_embeddings=False)
    config = peft.LoraConfig(r=4, target_modules=["lm_head"])
    trainer = sft(tmp_path, tiny_tokenizer, model=model, peft_config=config, max_steps=1)
    trainer.train()
    (b,) = [p for n, p in trainer.model.named_parameters() if "lora_B" in n]  # Zero until a gradient reaches it.
    assert b.abs().sum() > 0


@pytest.mark.parametrize("tied", [True, False])
def test_trap_42_t46_rows_of_new_tokens_are_trained_beside_an_adapter(tiny_tokenizer, tmp_path, tied):
    source = build_tokenizer()
    source.add_tokens(["<|say|>"], special_tokens=True)
    source.chat_template = "{% for m in messages %}{{ '<|say|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    source.save_pretrained(tmp_path / "source")
    model = build_model(len(tiny_tokenizer), tie_word_embeddings=tied)
    rows = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "hi"}]}] * 4)
    trainer = sft(
        tmp_path, tiny_tokenizer, model=model, data=rows, chat_template_path=str(tmp_path / "source"), max_steps=1,
        peft_config=peft.LoraConfig(**LORA),
    )  # fmt: skip
    new = tiny_tokenizer.convert_tokens_to_ids("<|say|>")
    assert new in trainer.plan.added_tokens

    def scores():
        """Logits of the new and of an old token after hidden states of ones: what the head in force says."""
        layer = trainer.model.get_base_model().get_output_embeddings()
        with torch.no_grad():
            return layer(torch.ones(1, 32))[0, [new, 5]].clone()

    def embedded():
        with torch.no_grad():
            return trainer.model.get_input_embeddings()(torch.tensor([new, 5])).clone()

    heads, embeddings = scores(), embedded()
    trainer.train()
    assert not torch.equal(embedded()[0], embeddings[0])
    assert torch.equal(embedded()[1], embeddings[1])
    assert scores()[0] != heads[0]
    if tied:  # One matrix in two places stays one.
        assert torch.allclose(scores()[0], embedded()[0].sum(), atol=1e-5)
        assert scores()[1] == heads[1]


def test_trap_43_generation_stops_at_every_token_that_training_ends_with(tiny_tokenizer, tiny_model, tmp_path):
    """The user's own tokenizer ends texts with another token, and its template ends turns with the old one."""
    tiny_tokenizer.eos_token = "<|endoftext|>"
    tiny_model.generation_config.eos_token_id = 7
    trainer = sft(tmp_path, tiny_tokenizer, model=tiny_model)
    assert tiny_model.generation_config.eos_token_id == [7, 0, 2]
    mirror_eos(tiny_tokenizer, tiny_model, trainer.args)
    assert tiny_model.generation_config.eos_token_id == [7, 0, 2]


def test_trap_44_checkpointing_options_outlive_generation(tiny_tokenizer, tmp_path):
    options = {"use_reentrant": True, "preserve_rng_state": False}
    trainer = grpo(
        tmp_path, tiny_tokenizer, engine="native", gradient_checkpointing=True, gradient_checkpointing_kwargs=options,
        max_steps=1, max_completion_length=3, kept_layers=0,
    )  # fmt: skip
    trainer.train()
    for layer in trainer.accelerator.unwrap_model(trainer.model).model.layers:
        assert layer.gradient_checkpointing
        assert layer._gradient_checkpointing_func.keywords == options


def grads(model, context):
    model.zero_grad()
    with context:
        logits = model(input_ids=torch.arange(12, device=model.device).view(2, 6), use_cache=False).logits
        view = logits.mean(-1, keepdim=True).expand_as(logits)[
            :, 1:
        ]  # Broadcast (stride 0), and a view with an offset.
        ((logits[:, 1:] - view) ** 2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_trap_45_t36_offloaded_activations_give_the_same_gradient_step_after_step(tiny_model):
    from contextlib import nullcontext

    hooks = OffloadActivations(device_type="cpu", min_offload_size=1)
    for step in range(3):
        moved(tiny_model, seed=step)
        for a, b in zip(grads(tiny_model, nullcontext()), grads(tiny_model, hooks), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))
    assert hooks.offloaded_bytes > 0


@pytest.mark.gpu
def test_trap_45_t36_offloaded_activations_give_the_same_gradient_on_any_stream():
    from contextlib import nullcontext

    model = build_model(97).cuda()
    plain = grads(model, nullcontext())
    hooks = OffloadActivations(device_type="cuda", min_offload_size=1)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(5):
                for a, b in zip(plain, grads(model, hooks), strict=True):
                    assert torch.allclose(a, b, rtol=0, atol=1e-5 * float(a.abs().max()))
        torch.cuda.synchronize()
    assert hooks.offloaded_bytes > 0


def test_trap_46_an_entropy_bonus_and_the_head_s_bias_have_gradients():
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    bias, targets = torch.randn(11, requires_grad=True), torch.arange(5)
    out = token_logprobs(hidden, weight, targets, bias=bias, chunk_size=2, entropy_grad=True)
    ours = torch.autograd.grad(out.entropy.sum(), (hidden, weight, bias))
    logprobs = torch.log_softmax(hidden @ weight.T + bias, -1)
    theirs = torch.autograd.grad(-(logprobs.exp() * logprobs).sum(), (hidden, weight, bias))
    for a, b in zip(ours, theirs, strict=True):
        assert a.abs().max() > 1e-3
        assert torch.allclose(a, b, atol=1e-5)


def test_trap_47_loading_says_the_dtype_the_size_and_what_the_checkpoint_was(tiny_model, tmp_path, caplog):
    tiny_model.bfloat16().save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        assert create_model_from_path(str(tmp_path)).dtype == torch.float32
    assert "GiB in float32" in caplog.text
    assert "The dtype of the checkpoint is torch.bfloat16" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert create_model_from_path(str(tmp_path), dtype="auto").dtype == torch.bfloat16
    assert "GiB in bfloat16." in caplog.text
    assert "The dtype of the checkpoint" not in caplog.text


def test_trap_48_t39_several_gpus_and_one_process_are_refused_with_the_launch_command(tiny_tokenizer, tmp_path):
    from posttrain import SFTConfig, SFTTrainer

    args = SFTConfig(str(tmp_path), report_to="none", bf16=False)
    assert args.n_gpu <= 1
    args._n_gpu = 2
    with raises(ConfigError, "2", "num_processes"):
        SFTTrainer(build_model(len(tiny_tokenizer)), args, train_dataset=chats(), processing_class=tiny_tokenizer)


# The loss -------------------------------------------------------------------------------------------------------------


def test_t4_a_missing_pad_token_becomes_one_that_nothing_uses():
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    tokenizer.add_tokens(["<|reserved_0|>", "<|right_pad_id|>"], special_tokens=True)
    model = build_model(len(tokenizer))
    assert resolve_pad_token(tokenizer, model) == tokenizer.convert_tokens_to_ids("<|right_pad_id|>")
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    for used in ("template", "no row in the embedding"):
        tokenizer = build_tokenizer()
        tokenizer.pad_token = None
        small = build_model(len(tokenizer))
        tokenizer.add_tokens(["<|right_pad_id|>"], special_tokens=True)
        if used == "template":
            small = build_model(len(tokenizer))
            tokenizer.chat_template += "{{ '<|right_pad_id|>' }}"
        assert resolve_pad_token(tokenizer, small) == tokenizer.eos_token_id


def test_t13_a_model_that_ignores_positions_and_masks_never_gets_packed_rows(caplog):
    from transformers import CONFIG_MAPPING

    attention.PROBED.clear()
    torch.manual_seed(0)
    config = CONFIG_MAPPING["mamba"](vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    layout = probe.probe_layout(model)
    assert layout.kind == "padded"
    assert "gives different results for packed rows with shared prompts" in caplog.text
    rows = [Row([], [[5, 6, 7, 8]], [[1] * 4]), Row([], [[9, 10]], [[1] * 2])]
    for batch in collate(rows, pad_token_id=0, layout=layout):
        assert batch.one_sequence_a_row


def test_t13_sdpa_isolates_documents_and_is_not_warned_about(caplog):
    attention.PROBED.clear()
    assert probe.probe_layout(build_model(97)).kind == "tree"
    assert not caplog.records


RULED = {
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "hyperclovax": {"logits_scaling": 8.0},
    "falcon_h1": {
        "lm_head_multiplier": 0.1,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 1},
}


@pytest.mark.parametrize("name", RULED)
def test_t16_fused_log_probs_follow_what_the_architecture_does_to_its_logits(name):
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**(shape | RULED[name]))).eval()
    assert torch.allclose(logps(model), sequence_logps(model, ROWS)[0], atol=1e-4)


def test_t16_an_architecture_with_a_rule_of_its_own_is_found_and_computes_its_own_logits(caplog):
    """A head with a factor that no config names: the probe compares it with the model's own forward."""
    model = scale_logits(build_model(97, tie_word_embeddings=False))
    truth = sequence_logps(model, ROWS)[0]
    assert not torch.allclose(logps(model), truth, atol=1e-2)
    probe.probe_head(model)
    assert "changes its logits in a way that the chunked head does not support" in caplog.text
    assert torch.allclose(logps(model), truth, atol=1e-5)
    fine = build_model(97)
    probe.probe_head(fine)
    assert "own_logits" not in vars(fine)


def test_what_hangs_on_an_output_layer_runs_in_training_too():
    """Hooks that look, that change the gradient alone, and a weight that is made of others before each call."""
    seen = []
    kinds = {
        "forward": lambda head: head.register_forward_hook(lambda *_: seen.append(1)),
        "before": lambda head: head.register_forward_pre_hook(lambda *_: seen.append(1)),
        "backward": lambda head: head.register_full_backward_hook(
            lambda _, into, out: seen.append(1) or (into[0] * 0.5,)
        ),
        "weight_norm": torch.nn.utils.weight_norm,
    }
    for kind, hang in kinds.items():
        models = [build_model(97, tie_word_embeddings=False) for _ in range(2)]
        for model in models:
            hang(model.lm_head)
        (row,) = ROWS[:1]
        ids = torch.tensor([row.prompt_ids + row.completions[0]])
        truth = models[0](input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        truth[len(row.prompt_ids) - 1 :].sum().backward()
        count = len(seen)
        (batch,) = collate(ROWS, pad_token_id=0, layout=Layout("padded"))
        forward(models[1], batch).logp.sum().backward()
        assert kind == "weight_norm" or len(seen) > count
        for (name, ours), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-4), (kind, name)


def test_t17_ranks_run_equally_many_passes_however_little_they_train(monkeypatch):
    """A forward is a collective under sharding; a rank with fewer micro-batches runs idle ones, and masks change no count."""
    monkeypatch.setattr(parallel, "shards_parameters", lambda accelerator: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts, op: counts.fill_(4))

    class Accelerator:
        device, distributed_type = "cpu", "FSDP"

    assert parallel.equal_passes(1, Accelerator()) == 4
    calls = []
    for trained in (4, 1, 0):
        model = build_model(97)
        install_token_head(model)
        told_of_calls(model.lm_head, lambda: calls.append("head"))
        model.model.register_forward_hook(lambda *_, t=trained: calls.append(t))
        (batch,) = collate([Row([5, 6], [[8, 9, 10, 11]], [[1] * trained + [0] * (4 - trained)])], pad_token_id=0)
        forward(model, batch).logp.sum().backward()
        assert all(p.grad is not None for p in model.parameters())  # Every parameter takes part in backward too.
    assert calls == [4, 1, 0]


def test_t15_a_step_without_a_trained_token_has_loss_zero_and_no_nan(tiny_tokenizer, tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9, 10]], "labels": [[-100] * 3, [-100, 9, 10]]})
    trainer = sft(
        tmp_path, tiny_tokenizer, data=rows, loss_type="dft", per_device_train_batch_size=1, max_steps=2,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer.train()
    assert 0.0 in losses(trainer)
    assert torch.isfinite(weights(trainer)).all()


def test_t24_metrics_weigh_tokens_and_not_micro_batches(tiny_tokenizer, tmp_path):
    """Rows of 2 to 13 trained tokens: in one micro-batch, or in twelve, the same numbers."""
    logs = []
    for batch, accumulation in ((12, 1), (1, 12)):
        trainer = sft(
            tmp_path,
            tiny_tokenizer,
            max_steps=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
        )
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert logs[0][name] == pytest.approx(logs[1][name], rel=1e-5)


def test_t30_one_target_module_is_a_name_and_not_a_pattern():
    config = get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["q_proj"]))
    model = peft.get_peft_model(build_model(97), config)
    assert sum("q_proj.lora_A" in name for name, _ in model.named_parameters()) == 2
    assert (
        get_peft_config(ModelConfig(use_peft=True, lora_target_modules=["all-linear"])).target_modules == "all-linear"
    )


def test_t33_magnitudes_of_a_quantised_dora_keep_float32():
    model = build_model(97)
    model.is_loaded_in_4bit = True
    config = peft.LoraConfig(**LORA, use_dora=True)
    wrapped = wrap_with_peft(model, config, activation_checkpointing=False)
    kinds = {("magnitude" in n, p.dtype) for n, p in wrapped.named_parameters() if p.requires_grad}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_t34_an_adapter_keeps_its_dropout_and_the_model_loses_all_of_its_own(tiny_tokenizer, tmp_path):
    model = scorer(tiny_tokenizer)
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    config = peft.LoraConfig(**LORA, lora_dropout=0.5)
    trainer = reward(tmp_path, tiny_tokenizer, model=model, peft_config=config)
    rates = {m.p for n, m in trainer.model.named_modules() if "lora_dropout" in n and isinstance(m, torch.nn.Dropout)}
    assert rates == {0.5}
    assert {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.0}
    assert model.config.attention_dropout == 0.0
    disable_dropout_in_model(trainer.model)  # Also where the adapter came with the model.
    assert {m.p for n, m in trainer.model.named_modules() if n.endswith("lora_dropout.default")} == {0.5}


def test_t35_a_partly_frozen_model_is_averaged_by_name_and_a_short_run_saves_no_initial_weights(
    tiny_tokenizer, tmp_path
):
    model = build_model(len(tiny_tokenizer))
    model.model.embed_tokens.weight.requires_grad_(False)
    start = {name: p.clone() for name, p in model.named_parameters()}
    trainer = sft(tmp_path, tiny_tokenizer, model=model, callbacks=[BEMACallback(update_freq=400)], max_steps=2)
    trainer.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bema", dtype=torch.float32)
    for name, value in saved.named_parameters():
        assert torch.equal(value, start[name]) == (name == "model.embed_tokens.weight"), name


def test_t37_four_bit_weights_compute_in_bfloat16_from_the_command_line(monkeypatch):
    monkeypatch.setattr("posttrain.models.load.bf16_is_faster", lambda: True)
    assert get_quantization_config(ModelConfig(load_in_4bit=True)).bnb_4bit_compute_dtype == torch.bfloat16
    half = ModelConfig(load_in_4bit=True, dtype="float16")
    assert get_quantization_config(half).bnb_4bit_compute_dtype == torch.float16


def test_t43_metrics_stay_on_the_device_and_cross_ranks_once_a_log():
    buffer, gathers = MetricBuffer(), []
    for step in range(20):
        values = torch.arange(3.0) + step
        buffer.add({"loss": mean(values), "entropy": mean(values, values > 1), "lowest": mean(2.0)})
    held = [metric.value for metric in buffer._items.values()]
    assert isinstance(held[0], torch.Tensor)  # No `.item()`, which would wait for the device.
    assert isinstance(held[1], torch.Tensor)

    def gather(rows):
        gathers.append(len(rows))
        return rows * 2

    found = buffer.compute(gather)
    assert gathers == [3]
    assert found["loss"] == pytest.approx(10.5)
    buffer.add({"low": minimum(3.0)})
    assert buffer.compute() == {"low": 3.0}


def test_t44_the_score_is_read_at_the_eos_although_it_is_the_pad_token(tiny_tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = reward(tmp_path, tiny_tokenizer)
    assert "the pad token equals the eos token" in caplog.text
    model, rows = trainer.model.eval(), list(trainer.train_dataset)
    trainer.eval_dataset = trainer.train_dataset
    found = trainer.predict(trainer.train_dataset).predictions
    for row, (chosen, _) in zip(rows, found, strict=True):
        assert chosen == pytest.approx(alone(model, row["chosen_ids"]), abs=1e-4)
        assert chosen != pytest.approx(alone(model, row["chosen_ids"][:-1]), abs=1e-4)


@pytest.mark.parametrize("given", ["folder", "object", "hub id"])
def test_t45_a_reward_model_is_refused_by_trainers_that_generate(tiny_tokenizer, tmp_path, monkeypatch, given):
    model = scorer(tiny_tokenizer)
    if given == "object":
        with raises(ModelError):
            sft(tmp_path, tiny_tokenizer, model=model)
        check_model_source(model, generative=False)
        return
    model.save_pretrained(tmp_path / "reward")
    if given == "folder":
        with raises(ModelError):
            check_model_source(str(tmp_path / "reward"))
        return
    import transformers

    read = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: read(tmp_path / "reward"))
    with raises(ModelError, "'owner/reward'"):
        create_model_from_path("owner/reward")


def test_t47_a_logging_callback_leaves_padding_side_dropout_and_checkpointing_as_they_were(tiny_tokenizer, tmp_path):
    tiny_tokenizer.padding_side = "right"
    prompts = datasets.Dataset.from_list([{"prompt": "What is"}, {"prompt": "The answer is a"}])
    trainer = sft(
        tmp_path,
        tiny_tokenizer,
        eval_dataset=chats(2),
        max_steps=1,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    )
    trainer.eval_dataset = prompts
    trainer.model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
    trainer.model.train()
    assert len(EvalPrompts(trainer, GenerationConfig(max_new_tokens=2)).complete()) == 2
    assert tiny_tokenizer.padding_side == "right"
    assert all(module.training for module in trainer.model.modules())
    keywords = trainer.model.model.layers[0]._gradient_checkpointing_func.keywords
    assert keywords == {"use_reentrant": True, "preserve_rng_state": False}


def test_t48_the_count_of_tokens_goes_on_where_the_checkpoint_stood(tiny_tokenizer, tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    whole = sft(tmp_path / "a", tiny_tokenizer, **settings)
    whole.train()
    part = sft(tmp_path / "b", tiny_tokenizer, **settings)
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    counts = [row["num_tokens"] for row in whole.state.log_history if "num_tokens" in row]
    assert part.counters["num_tokens"] == counts[-1] > counts[0] > 0


class Casts(TorchDispatchMode):
    """Counts conversions of tensors of one shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_to_copy" in str(function) and getattr(args[0], "shape", None) == self.shape:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [2, 64])
def test_t49_the_head_is_not_cast_again_for_every_chunk(chunk):
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 8).bfloat16().requires_grad_(), torch.randn(97, 8).bfloat16().requires_grad_()
    with Casts(weight.shape) as casts:
        token_logprobs(hidden, weight, torch.arange(64), chunk_size=chunk).logp.sum().backward()
    assert casts.count <= 1  # The gradient, summed in float32, once at the end.


def test_trap_27_packing_changes_neither_loss_nor_gradient(tiny_tokenizer, tmp_path):
    """The same documents, packed and loose, in one step: what packing changes is how many of them a step holds."""
    found = []
    for packing in (False, True):
        trainer = sft(
            tmp_path, tiny_tokenizer, packing=packing, max_length=64, max_steps=1, per_device_train_batch_size=12
        )
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm", "num_tokens")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
