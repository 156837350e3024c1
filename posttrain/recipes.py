"""Published settings of GRPO and its family, as fields for `GRPOConfig`.

Each function returns a dict: ``GRPOConfig("out", **dapo(), learning_rate=1e-6)``. What a paper does outside of the config
(reward shaping, data) is named in the docstring. Clipping acts only where batches outlive an update: most papers go over a
generation in several optimiser steps, so set ``steps_per_generation`` above ``gradient_accumulation_steps``.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "dapo", "deepseek_v3_2", "dr_grpo", "eighty_twenty", "gdpo", "gspo", "intellect_2", "lite_ppo", "luspo", "mis", "r1",
    "sapo", "scale_rl", "skywork_or1", "tis", "two_grpo", "vespo",
]  # fmt: skip

Fields = dict[str, Any]


def r1() -> Fields:
    """DeepSeek-R1, arXiv:2501.12948.

    >>> r1()["epsilon"]
    10.0
    """
    return {
        "loss_type": "grpo",
        "beta": 0.001,
        "epsilon": 10.0,
        "num_generations": 16,
        "max_completion_length": 32768,
    }


def gspo(gradient_accumulation_steps: int = 1) -> Fields:
    """GSPO, arXiv:2507.18071: a generation is gone over in four optimiser steps.

    Args:
        gradient_accumulation_steps: Yours.
    """
    return {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "steps_per_generation": 4 * gradient_accumulation_steps,
    }


def dapo() -> Fields:
    """DAPO, arXiv:2503.14476.

    Its rewards go with ``get_soft_overlong_punishment(20480, 4096)``; its dynamic sampling is ``dynamic_sampling=10``.
    """
    return {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "mask_truncated_completions": True,
        "beta": 0.0,
        "max_completion_length": 20480,
    }


def eighty_twenty() -> Fields:
    """Beyond the 80/20 rule, arXiv:2506.01939: DAPO on the most uncertain fifth of the tokens."""
    return dapo() | {"top_entropy_quantile": 0.2}


def dr_grpo() -> Fields:
    """Dr. GRPO, arXiv:2503.20783: no length and no difficulty bias."""
    return {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0}


def lite_ppo() -> Fields:
    """Lite PPO, arXiv:2508.08221: std of the batch, mean over tokens. Samples truncated, so no correction of an engine."""
    return {
        "scale_rewards": "batch",
        "loss_type": "dapo",
        "top_p": 0.99,
        "top_k": 100,
        "temperature": 0.99,
        "vllm_importance_sampling_correction": False,
    }


def intellect_2() -> Fields:
    """INTELLECT-2, arXiv:2505.07291: two-sided clipping."""
    return {"delta": 4.0, "epsilon": 0.2, "beta": 0.001, "learning_rate": 3e-7}


def scale_rl() -> Fields:
    """ScaleRL, arXiv:2510.13786: CISPO with the output layer in float32."""
    return {"loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "cast_lm_head_to_fp32": True}


def tis() -> Fields:
    """Truncated importance sampling of Yao et al. 2025, for an engine that is not the trainer."""
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 2.0,
    }


def mis() -> Fields:
    """Masked importance sampling of Liu et al. 2025, for an engine that is not the trainer."""
    return {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 2.0,
    }


def sapo() -> Fields:
    """SAPO, arXiv:2511.20347: a soft gate, sharper for bad completions."""
    return {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}


def vespo() -> Fields:
    """VESPO, arXiv:2602.10693: its sequence weight takes an engine's correction token by token."""
    return {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}


def luspo() -> Fields:
    """LUSPO, arXiv:2602.05261: GSPO with sequences weighed by their length."""
    return {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "epsilon": 2e-3,
        "epsilon_high": 2.5e-3,
    }


def gdpo() -> Fields:
    """GDPO, arXiv:2601.05242: each reward is normalised in its group before they are added."""
    return {"multi_objective_aggregation": "normalize_then_sum"}


def two_grpo() -> Fields:
    """2-GRPO, arXiv:2510.00977: pairs; advantages are +-0.7071 or 0."""
    return {"num_generations": 2, "loss_type": "grpo"}


def deepseek_v3_2() -> Fields:
    """DeepSeek-V3.2, arXiv:2512.02556: an unbiased KL, and sequences the policy moved away from dropped."""
    return {"use_bias_correction_kl": True, "beta": 0.001, "off_policy_mask_threshold": 0.5}


def skywork_or1(entropy_target: float = 0.2) -> Fields:
    """Skywork-OR1, arXiv:2505.22312: the entropy bonus is steered.

    Args:
        entropy_target: Nats; near what the first steps of your own run log as ``entropy``.
    """
    return {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": entropy_target}
