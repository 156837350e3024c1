"""Operation counts against torch's own counter, and by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from posttrain.errors import ConfigError, ModelError
from posttrain.models.memory import H100_BF16_PEAK, adjusted_mfu, compute_flops_per_token, compute_mfu
from tests.conftest import build_model
from tests.wordings import raises

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def counted(model, length, rows=2):
    """Operations per token of forward and backward, counted while they run."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / (rows * length)


@pytest.mark.parametrize(("length", "head_dim"), [(8, 8), (24, 8), (8, 16)])
def test_tied_model_costs_what_torch_counts(length, head_dim):
    model = build_model(50, attn_implementation="eager", head_dim=head_dim)
    assert compute_flops_per_token(model.config, length) == counted(model, length)


def test_untied_model_also_counts_its_embedding_as_a_product():
    model = build_model(50, attn_implementation="eager", tie_word_embeddings=False)
    lookup = 3 * 2 * 50 * 32
    assert compute_flops_per_token(model.config, 8) == counted(model, 8) + lookup


def test_routed_model_costs_what_torch_counts():
    from transformers import Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = Qwen3MoeForCausalLM(config)
    assert compute_flops_per_token(config, 8) == counted(model, 8)


def test_dense_count_by_hand():
    """H=4, 2 heads and 1 key-value head of size 3, I=5, V=7, 1 layer, S=10, tied.

    QKV 2*4*(6+2*3)=96, output 2*6*4=48, scores 4*6*10=240, MLP 6*4*5=120, embedding 2*7*4=56; the sum 560, three times.
    """
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=4,
        intermediate_size=5,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=3,
        tie_word_embeddings=True,
    )
    assert compute_flops_per_token(config, 10) == 3 * 560
    config.tie_word_embeddings = False
    assert compute_flops_per_token(config, 10) == 3 * (560 + 56)


def mlp_flops(config):
    """The MLP part of the count: the whole, less a dense model's whole, plus its known MLP part."""
    dense = LlamaConfig(**SMALL, tie_word_embeddings=config.tie_word_embeddings)
    return (compute_flops_per_token(config, 8) - compute_flops_per_token(dense, 8)) // 3 + 4 * 6 * 32 * 48


ROUTED = 2 * 6 * 32 * 16 + 2 * 32 * 4  # Two of four experts of size 16, and the router.
DENSE = 6 * 32 * 48


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), 4 * ROUTED),
        (
            Qwen3MoeConfig(
                **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=2
            ),
            2 * ROUTED + 2 * DENSE,
        ),
        (
            Qwen3MoeConfig(
                **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[0, 3]
            ),
            2 * ROUTED + 2 * DENSE,
        ),
        (MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), 4 * (2 * DENSE + 2 * 32 * 4)),
        (
            Qwen2MoeConfig(
                **SMALL,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=24,
            ),
            4 * (ROUTED + 6 * 32 * 24 + 2 * 32),  # With the gate of the shared expert.
        ),
        (
            Ernie4_5_MoeConfig(
                **SMALL,
                moe_num_experts=4,
                moe_k=2,
                moe_intermediate_size=16,
                moe_num_shared_experts=3,
                moe_layer_start_index=1,
                moe_layer_end_index=2,
            ),
            2 * (ROUTED + 3 * 6 * 32 * 16) + 2 * DENSE,
        ),
        (
            Llama4TextConfig(
                **SMALL, num_local_experts=4, num_experts_per_tok=2, intermediate_size_mlp=20, moe_layers=[1, 3]
            ),
            2 * (3 * DENSE + 2 * 32 * 4) + 2 * 6 * 32 * 20,
        ),
    ],
    ids=["all", "every-second", "listed-dense", "no-own-size", "shared-expert", "range", "listed-sparse"],
)
def test_only_sparse_layers_are_counted_as_routed(config, expected):
    assert mlp_flops(config) == expected


def test_count_of_a_multimodal_model_is_that_of_its_text_part():
    config = Gemma3Config()
    assert compute_flops_per_token(config, 64) == compute_flops_per_token(config.get_text_config(), 64) > 0


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (DeepseekV3Config(), "latent attention"),
        (Qwen3NextConfig(), "linear_attention"),
    ],
)
def test_model_that_the_formula_does_not_describe_is_refused(config, what):
    with pytest.raises(ModelError, match=rf"{type(config).__name__}.*{what}.*|{what}.*FlopCounterMode"):
        compute_flops_per_token(config, 8)


def test_mlps_without_a_gate_cost_what_torch_counts():
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager")
    assert compute_flops_per_token(config, 8) == counted(GPT2LMHeadModel(config), 8)


def test_sequence_length_below_one_is_refused():
    with pytest.raises(ConfigError, match="seq_len=0"):
        compute_flops_per_token(LlamaConfig(**SMALL), 0)


def test_mfu_is_the_share_of_the_peak_of_all_devices():
    assert H100_BF16_PEAK == 989.5e12
    assert compute_mfu(1e9, 98_950) == pytest.approx(10.0)
    assert compute_mfu(1e9, 98_950, 2) == pytest.approx(5.0)
    assert compute_mfu(1e9, 1000, peak_flops=1e12) == pytest.approx(100.0)
    for broken in ({"world_size": 0}, {"peak_flops": 0}):
        with raises(ConfigError, "0"):
            compute_mfu(1e9, 1.0, **broken)


def test_adjusted_mfu_takes_half_of_the_scores_off():
    config = LlamaConfig(**SMALL)
    seq_len = 1000
    total = compute_flops_per_token(config, seq_len)
    scores = 3 * 4 * 4 * (4 * 8) * seq_len  # Three passes, four layers, 4nd a token.
    assert adjusted_mfu(compute_mfu(total, 1e6), config, seq_len) == pytest.approx(compute_mfu(total - scores / 2, 1e6))
    assert adjusted_mfu(40.0, config, 1) > adjusted_mfu(40.0, config, 10**6) > 20.0
