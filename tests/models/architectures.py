"""Tiny random models of many architectures, with windows that are longer than a careless probe, and the plain truth."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB, WINDOW, ORIGINAL = 97, 24, 32
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
SLIDING = {"sliding_window": WINDOW}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
SOME = SLIDING | {"use_sliding_window": True, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
}  # fmt: skip
RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
STATE_SPACE = {
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}  # fmt: skip
KIMI = {
    "linear_num_heads": 4, "linear_head_dim": 8, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}

LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

# By name: the model type, fields of its config, whether it takes a forest, whether the native engine runs it.
ARCHITECTURES = {
    "llama": ("llama", {}, True, True),
    "llama whose config names a window it has not": ("llama", SLIDING, True, True),
    "qwen2 with a window": ("qwen2", SOME, True, True),
    "qwen3 with a window": ("qwen3", SOME, True, True),
    "qwen3 moe": ("qwen3_moe", SOME | EXPERTS, True, True),
    "qwen2 moe": ("qwen2_moe", SOME | EXPERTS | {"shared_expert_intermediate_size": 16}, True, True),
    "mistral": ("mistral", SLIDING, True, True),
    "mixtral": ("mixtral", SLIDING | {"num_local_experts": 4}, True, True),
    "gemma2": ("gemma2", SLIDING | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0}, True, True),
    "gemma3": ("gemma3_text", MIXED | {"query_pre_attn_scalar": 8}, True, True),
    "gemma4": (
        "gemma4_text",
        MIXED | {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        True,
        True,
    ),
    "exaone4": ("exaone4", MIXED | {"sliding_window_pattern": 2}, True, True),
    "phi3": ("phi3", SLIDING, True, True),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        True,
        True,
    ),
    "phimoe": ("phimoe", SLIDING | {"num_local_experts": 4}, True, False),
    "cohere2": ("cohere2", MIXED, True, True),
    "olmo2": ("olmo2", {}, True, True),
    "olmo3": ("olmo3", MIXED, True, True),
    "smollm3": ("smollm3", MIXED | {"use_sliding_window": True}, True, True),
    "gpt-oss": ("gpt_oss", MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}, True, True),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}, True, True),
    "gpt2": ("gpt2", {}, True, True),
    "gpt-neo": (
        "gpt_neo",
        {"window_size": WINDOW, "attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
        False,
        False,
    ),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [],
            "floor_scale": WINDOW,
        },
        True,
        True,
    ),
    "deepseek v3": ("deepseek_v3", LATENT, True, True),
    "jamba": (
        "jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
        },
        False,
        False,
    ),
    "mamba": ("mamba", {"state_size": 4}, False, False),
    "recurrent gemma": (
        "recurrent_gemma",
        {"attention_window_size": WINDOW, "lru_width": 32, "block_types": ["recurrent", "attention"]},
        False,
        False,
    ),
    "qwen3 next": (
        "qwen3_next",
        RECURRENT | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16},
        True,
        True,
    ),
    "qwen3.5": ("qwen3_5_text", RECURRENT | LINEAR, True, True),
    "qwen3.5 moe": (
        "qwen3_5_moe_text",
        RECURRENT | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16},
        True,
        True,
    ),
    "olmo hybrid": ("olmo_hybrid", RECURRENT | LINEAR, True, True),
    "lfm2": ("lfm2", CONVOLUTION, True, True),
    "lfm2 moe": ("lfm2_moe", CONVOLUTION | EXPERTS | {"num_dense_layers": 1}, True, True),
    "nemotron h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
        },
        True,
        True,
    ),
    "falcon h1": ("falcon_h1", STATE_SPACE | {"mamba_d_ssm": 64}, True, True),
    "granite hybrid": (
        "granitemoehybrid",
        STATE_SPACE
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
        True,
        True,
    ),
    "bamba": ("bamba", STATE_SPACE | {"attn_layer_indices": [1]}, True, True),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "hybrid_layer_ids": [1],
        },
        True,
        True,
    ),
    "kimi linear": ("kimi_linear", RECURRENT | KIMI, True, True),
    "bailing hybrid": ("bailing_hybrid", RECURRENT | KIMI, True, True),
    "minimax": (
        "minimax",
        RECURRENT | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
        True,
        True,
    ),
}
HYBRIDS = list(ARCHITECTURES)[list(ARCHITECTURES).index("qwen3 next") :]


def built(name, seed=0, **changes):
    """A model in float32."""
    kind, fields, _, _ = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**(SMALL | fields | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def ids(count, seed):
    """Random token ids."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def alone(model, prompt, completion):
    """Log-probs of a completion, by transformers' own forward of this one sequence."""
    ids = torch.tensor([[*prompt, *completion]])
    logp = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    logp = logp.gather(1, ids[0, 1:, None])[:, 0]
    return logp[len(prompt) - 1 :] if prompt else torch.cat([logp.new_zeros(1), logp])
