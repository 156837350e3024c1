"""Published settings: every file of a paper is a config that stands, with the numbers of its paper."""

from pathlib import Path

import pytest
import yaml

from posttrain import GRPOConfig

FILES = {path.stem: path for path in Path(__file__).parents[1].glob("examples/configs/papers/*.yaml")}
SPELLED = {
    "r1": {"loss_type": "grpo", "beta": 0.001, "epsilon": 10.0, "num_generations": 16, "max_completion_length": 32768},
    "gspo": {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "steps_per_generation": 4},
    "dapo": {
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.0,
        "max_completion_length": 20480,
    },
    "eighty_twenty": {"loss_type": "dapo", "epsilon_high": 0.28, "top_entropy_quantile": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "lite_ppo": {
        "scale_rewards": "batch", "loss_type": "dapo", "top_p": 0.99, "top_k": 100, "temperature": 0.99,
        "vllm_importance_sampling_correction": False,
    },
    "intellect_2": {"delta": 4.0, "epsilon": 0.2, "beta": 0.001, "learning_rate": 3e-7},
    "scale_rl": {
        "loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "cast_lm_head_to_fp32": True,
    },
    "tis": {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0},
    "mis": {
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_min": 0.5,
        "vllm_importance_sampling_clip_max": 2.0,
    },
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    "vespo": {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"},
    "skywork_or1": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 0.2},
    "luspo": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3,
    },
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "two_grpo": {"num_generations": 2, "loss_type": "grpo"},
    "deepseek_v3_2": {"use_bias_correction_kl": True, "beta": 0.001, "off_policy_mask_threshold": 0.5},
}  # fmt: skip


# Of the paper that a file names; TIS and MIS come from posts without one.
PAPERS = {
    "r1": "2501.12948", "gspo": "2507.18071", "dapo": "2503.14476", "eighty_twenty": "2506.01939",
    "dr_grpo": "2503.20783", "lite_ppo": "2508.08221", "intellect_2": "2505.07291", "scale_rl": "2510.13786",
    "sapo": "2511.20347", "vespo": "2602.10693", "luspo": "2602.05261", "gdpo": "2601.05242", "two_grpo": "2510.00977",
    "deepseek_v3_2": "2512.02556", "skywork_or1": "2505.22312",
}  # fmt: skip


def test_every_recipe_is_spelled_out_here_and_names_its_paper():
    assert set(SPELLED) == set(FILES)
    texts = {name: path.read_text() for name, path in FILES.items()}
    assert {n: text.partition("arXiv:")[2][:10] for n, text in texts.items() if "arXiv:" in text} == PAPERS
    assert set(FILES) - set(PAPERS) == {"tis", "mis"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_recipe_builds_a_config(tmp_path, name):
    fields = yaml.safe_load(FILES[name].read_text())
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=16, bf16=False, report_to="none", **fields)
    for field, value in SPELLED.get(name, {}).items():
        assert getattr(args, field) == value, field
