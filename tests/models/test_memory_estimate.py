"""Estimates of memory against counts made another way, and against what processes really took."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import GPTNeoXConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from posttrain import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)  # fmt: skip
from posttrain.checks.memory import Lengths, plan
from posttrain.data.forest import Layout, collate
from posttrain.errors import ModelError
from posttrain.models import memory_estimate
from posttrain.models.memory_estimate import (
    Generating,
    Part,
    Shadow,
    Shards,
    Workload,
    estimate_memory,
    optimizer_bytes,
    trace_pass,
)
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.prefix_cache import Prefiller
from posttrain.types import Request, Row, Sampling
from tests.models.architectures import built

LLAMA = LlamaConfig(
    vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
WEIGHTS = 2000 * 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "estimate.py"
REAL = Path.home() / ".cache" / "posttrain" / "SmolLM2-135M-Instruct"


def planned(trainer, config, *given, **options):
    """The plan of a trainer's method with a config."""
    return plan(trainer.METHOD(config), *given, **options)


def args(kind=SFTConfig, **settings):
    base = {"bf16": False, "report_to": "none", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return kind("out", **(base | settings))


def one_batch(rows=2, tokens=32):
    (batch,) = collate(
        [Row([], [[0] * tokens], [[1] * tokens])] * rows, pad_token_id=0, layout=Layout("tree", tokens, 9999)
    )
    return batch


def test_weights_gradients_and_states_are_counted_to_the_byte():
    found = estimate_memory(planned(SFTTrainer, args(), LLAMA, lengths=Lengths(0, 64)))
    assert found.parameters == found.trainable == WEIGHTS
    assert found.standing["weights"] == 4 * WEIGHTS
    assert found.standing["optimizer states"] == 8 * WEIGHTS
    assert found.moments["forward and backward"]["gradients"] == 4 * WEIGHTS


@pytest.mark.parametrize(
    ("name", "bytes_a_weight"),
    [
        ("adamw_torch", 8),
        ("adamw_torch_fused", 8),
        ("adamw_bnb_8bit", 2),
        ("paged_lion_8bit", 1),
        ("sgd", 0),
        ("lion_32bit", 4),
    ],
)
def test_states_of_optimizers(name, bytes_a_weight):
    assert optimizer_bytes(name, [(100, 400), (50, 200)]) == bytes_a_weight * 150


@pytest.mark.parametrize("name", ["galore_adamw", "galore_adamw_layerwise", "apollo_adamw"])
def test_states_of_a_low_rank_optimizer_are_those_of_its_subspace(name):
    """Of an m x n weight of rank r: m r + 2 n r (GaLore, arXiv:2403.03507, table 1). As Adam's, 7B was refused on 24 GB."""
    assert optimizer_bytes(name, [(4096 * 4096, 2 * 4096 * 4096)]) == 2 * 3 * 128 * 4096
    assert optimizer_bytes(name, [(4096, 8192)]) == 2 * 8192  # A vector has Adam's.


def test_states_of_adamw_are_those_that_torch_makes():
    model = torch.nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    real = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.dim())
    assert optimizer_bytes("adamw_torch", [(p.numel(), p.nbytes) for p in model.parameters()]) == real


def test_an_adapter_has_gradients_and_states_of_its_own_size_alone():
    import peft

    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    found = estimate_memory(planned(DPOTrainer, args(DPOConfig), LLAMA, lengths=Lengths(20, 10), peft_config=lora))
    assert found.trainable == 3 * (4 * 64 + 64 * 4)
    assert found.standing["optimizer states"] == 8 * found.trainable
    assert "reference" not in found.standing  # The policy without its adapter.
    assert found.moments["reference pass"]["activations"] > 0


@pytest.mark.matrix
@pytest.mark.slow
def test_a_frozen_copy_is_held_where_the_method_compares():
    settings = {"num_generations": 2, "max_completion_length": 16}
    assert estimate_memory(planned(DPOTrainer, args(DPOConfig), LLAMA)).standing["reference"] == 4 * WEIGHTS
    with_kl = planned(GRPOTrainer, args(GRPOConfig, beta=0.1, **settings), LLAMA)
    without = planned(GRPOTrainer, args(GRPOConfig, beta=0.0, **settings), LLAMA)
    gap = estimate_memory(with_kl).standing["reference"]
    assert gap == 4 * WEIGHTS and "reference" not in estimate_memory(without).standing


def test_kept_activations_grow_with_tokens_and_checkpointing_saves_them():
    shadows = {on: Shadow(Part("policy", LLAMA), checkpointing=on, kept_layers=0) for on in (True, False)}
    small, large = (trace_pass(shadows[False], one_batch(tokens=n))["activations"] for n in (64, 128))
    assert 1.9 < large / small < 2.1 + 0.5  # Masks and scores grow faster.
    assert trace_pass(shadows[True], one_batch(tokens=128))["activations"] < 0.6 * large


SMALL = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 2}


@pytest.mark.parametrize("kind", [LLAMA, Qwen3MoeConfig(**SMALL, **ROUTED)], ids=["dense", "routed"])
def test_a_trace_is_what_a_real_pass_holds(kind):
    """The activations that autograd saves, counted by torch's own hooks on a real model."""
    from transformers import AutoModelForCausalLM

    from posttrain.models.forward import forward, install_token_head

    batch = one_batch(tokens=96)
    model = AutoModelForCausalLM.from_config(kind).train()
    install_token_head(model)
    known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward(model, batch)
    held = sum(size for key, (size, _) in saved.items() if key not in known)
    traced = trace_pass(Shadow(Part("policy", kind)), batch)
    assert out.logp is not None
    assert held <= traced["activations"] <= 1.35 * held  # On top of it what one operation works with.


def test_tracing_takes_no_memory_for_a_model_of_seventy_billion_weights():
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    )  # fmt: skip
    shadow = Shadow(Part("policy", config, dtype=torch.bfloat16), checkpointing=True)
    assert 140e9 < sum(size for size, _ in shadow.named_sizes().values()) < 142e9


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=500),
        GPTNeoXConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=700),
    ],
)  # fmt: skip
def test_other_families_are_traced(config):
    assert estimate_memory(planned(SFTTrainer, args(), config, lengths=Lengths(0, 64))).moments["forward and backward"]


def test_a_model_that_needs_values_is_refused_with_what_measures_it(monkeypatch):
    def reads_values(*args, **kwargs):
        raise RuntimeError("aten.nonzero.default")

    monkeypatch.setattr(memory_estimate, "trace_pass", reads_values)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*aten.nonzero.*dry_step=True"):
        estimate_memory(planned(SFTTrainer, args(), LLAMA, lengths=Lengths(0, 64)))


def test_shards_divide_what_they_name():
    batch = [one_batch()]
    whole = estimate_memory(Workload(Part("policy", LLAMA), batch, passes=2))
    zero2 = estimate_memory(Workload(Part("policy", LLAMA), batch, passes=2, shards=Shards(1, 4, 4, 4)))
    zero3 = estimate_memory(Workload(Part("policy", LLAMA), batch, passes=2, shards=Shards(4, 4, 4, 4)))
    ddp = estimate_memory(Workload(Part("policy", LLAMA), batch, passes=2, shards=Shards(processes=4)))
    assert zero2.standing["weights"] == whole.standing["weights"] == 4 * zero3.standing["weights"]
    assert whole.standing["optimizer states"] == 4 * zero2.standing["optimizer states"]
    assert ddp.standing["gradient buckets"] == 4 * WEIGHTS


def test_an_adapter_of_a_classifier_is_the_one_that_its_trainer_makes():
    """The command line's default task is CAUSAL_LM, with which peft expects a language-model head."""
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    found = estimate_memory(planned(RewardTrainer, args(RewardConfig), LLAMA, peft_config=lora, lengths=Lengths(0, 64)))
    assert found.trainable == 3 * 2 * (64 + 64) + 64  # Three layers, and the classifier's head.


def test_fsdp_divides_as_its_config_says():
    """transformers makes True of whatever ``fsdp`` was, and keeps the rest in ``fsdp_config``."""
    for kept, shards in ((True, Shards(4, 4, 4, 4)), (False, Shards(1, 4, 4, 4))):
        config = args(fsdp=True, fsdp_config={"reshard_after_forward": kept})
        assert planned(SFTTrainer, config, LLAMA, lengths=Lengths(0, 64), processes=4).shards == shards


def test_keys_and_values_are_counted_by_the_formula():
    """2 (keys, values) x 3 layers x 2 heads x 16 numbers x 4 bytes a token; 8 live suffixes of 64, 2 prompts of 50."""
    asked = Generating(prompts=2, prompt_tokens=50, completion_tokens=60, sequences=8)
    found = estimate_memory(Workload(Part("policy", LLAMA), [one_batch()], generating=asked))
    assert found.moments["generation"]["keys and values"] == 2 * 3 * 2 * 16 * 4 * (8 * 64 + 2 * 50)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron h", "falcon h1", "zamba2", "minimax"])
def test_recurrent_states_are_those_of_the_native_engine(name):
    model = built(name)
    engine = NativeEngine(model, pad_token_id=0)
    seen, begin = [], Prefiller.forward

    def watched(self, *args, **options):
        found = begin(self, *args, **options)
        seen.append((sum(x.nbytes for x in args[3]), len(args[4])))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefiller, "forward", watched)
        engine.generate([Request([5, 6, 7], 1, Sampling(2, seed=0))], Sampling(2, seed=0))
    asked = Generating(prompts=2, prompt_tokens=50, completion_tokens=60, sequences=8)
    work = Workload(Part("policy", model.config), [one_batch()], generating=asked)
    found = estimate_memory(work).moments["generation"]
    assert seen[0][1] == 1 and seen[0][0] > 0
    assert found["recurrent states"] == seen[0][0] * (8 + 2)


def test_ppo_counts_its_value_model_and_its_reward_model():
    config = args(PPOConfig, response_length=16)
    head = estimate_memory(planned(PPOTrainer, config, LLAMA))
    model = estimate_memory(planned(PPOTrainer, config, LLAMA, parts={"value_model": LLAMA, "reward_model": LLAMA}))
    assert head.trainable == WEIGHTS + 64 + 1
    assert model.trainable == 2 * WEIGHTS + 64  # A classifier has no bias.
    assert model.standing["reward model"] == 4 * (WEIGHTS + 64)


def measured(name, case):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(BENCHMARK), "--one", name, case]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of processes are read from /proc")
def test_an_estimate_is_within_a_fifth_of_the_measured_peak():
    row = measured("llama-58m", "sft")
    assert abs(row["error"]) < 0.2, row


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="needs the model of posttrain demo")
@pytest.mark.parametrize("case", ["sft", "sft, LoRA", "dpo", "grpo"])
def test_estimates_of_a_real_model_are_within_a_fifth(case):
    row = measured(str(REAL), case)
    assert abs(row["error"]) < 0.2, row


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_the_tower_and_its_pixels_are_counted(name):
    from posttrain.extensions.images.picture import read_picture
    from posttrain.extensions.images.processors import PictureProcessor
    from tests.vision_families import build, noise

    model, processor = build(name)
    reader = PictureProcessor(processor)
    held = functools.partial(reader.shapes, [read_picture(noise(84, 56))])
    known = {"lengths": Lengths(40, 8), "device": "cpu"}
    options = {"gradient_checkpointing": False, "max_length": None}
    text, own = estimate_memory(planned(SFTTrainer, args(**options), model.config, **known)), {}
    for choice in ("auto", True, "tower"):
        work = planned(SFTTrainer, args(freeze_vision=choice, **options), model.config, pixels=held, **known)
        own[choice] = estimate_memory(work)
    weights = sum(p.numel() for p in model.parameters())
    assert own["auto"].parameters == own["auto"].trainable == weights
    # Rows of text train no parameter of the tower, and neither does freeze_vision=True; the projector is not the tower.
    assert text.trainable == own[True].trainable < own["tower"].trainable < weights
    images = {choice: found.moments["forward and backward"]["images"] for choice, found in own.items()}
    pixels = sum(one.numel() * 4 for one in work.pixels.values() if one.is_floating_point())
    assert images["auto"] > pixels > 0 == text.moments["forward and backward"]["images"]
    # Without gradients in the tower, nothing but its features is left when the text model's pass is at its fullest.
    assert images["auto"] > images[True]
