"""Methods that a subclass overrides by TRL's and transformers' names: called, or refused with the hook to use.

`adapt` is the one door: a trainer of a class of this package never comes here. Private methods of TRL's trainers are refused
(`REFUSED`); of transformers' methods an adapter calls those whose arguments would differ, and the loop calls the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.errors import ConfigError
from posttrain.loop.build import PADDED_STEPS, user_override

# Accepted without a word: TRL sends figures of use with it, and nothing is sent here.
SILENT = ("_send_telemetry",)

LOSS = "objective(outputs, batch), which returns unreduced LossTerms"
PREPARE = "prepare(dataset, name, *, training)"
GENERATE = "generate_and_score(examples, mode)"
ROLL_OUT = "roll_out(examples, mode)"
EPISODES = f"{ROLL_OUT}, or pass rollout_func"
SAMPLE = "sample(prompts, sampling)"
TOKENIZE = "tokenize(examples)"
SCORE = "score(generation, mode)"
LOG = "log_metrics_now(metrics, mode)"
ENGINE = "an engine of your own, passed as rollout_engine, whose load_weights does it"
TRANSFER = "weight_transfer, an object with send_weights"
FORWARD = "compute_loss_terms(model, batch)"
PADDED = "compute_loss(model, inputs, return_outputs), which gets the same dict"
TEACHER = "facts(generation, table, mode)"


def _rows(methods: dict[str, str]) -> dict[str, str]:
    """TRL's method to its hook, from hooks and the methods that each replaces, with blanks between."""
    return {name: hook for hook, names in methods.items() for name in names.split()}


# By our class: TRL's method -> the hook that does its job. A subclass inherits the rows of its bases.
GROUPED = _rows(
    {
        LOSS: "compute_liger_loss get_off_policy_mask get_gamma_weights get_high_entropy_mask",
        LOG: "_log_metric",
    }
) | {
    "_get_per_token_logps_and_entropies": f"{FORWARD} for the policy, logps(model, rows) for older weights",
    "_log_completion_extra": "completion_rows(generation, table)",
}
SELF_DISTILLED = _rows(
    {
        LOSS: "_compute_self_distillation_loss _compute_server_distillation_loss",
        FORWARD: "_compute_rollout_logps _compute_teacher_student_logits _forward_logits",
        SAMPLE: "_generate_transformers _generate_vllm",
        GENERATE: "_get_completion_ids_list _prepare_training_batch sample_rollouts",
        TEACHER: "_get_teacher_context_for_self_distillation _get_teacher_token_logprobs_from_server _setup_teacher_model "
        "_use_peft_ema_teacher_adapter",
        LOG: "_dispatch_self_distillation_callback _log_self_distillation_metric _record_completion_metrics",
    }
)
SERVED_LOSS = (
    "_compute_server_forward_kl_loss _compute_server_sparse_top_1_divergence_loss _compute_sparse_top_1_divergence_loss "
    "_get_reverse_kl_top_1_tokens"
)
REFUSED: dict[str, dict[str, str]] = {
    "PostTrainer": _rows({PADDED: "_compute_loss", PREPARE: "_prepare_dataset _reject_skip_prepare_without_labels"})
    | {
        "_prepare_input": "_prepare_inputs(inputs), which gets the whole dict",
        "_prepare_context_parallel_inputs": "_prepare_inputs(inputs); context parallelism is not offered",
    },
    "OnlineTrainer": _rows(
        {
            GENERATE: "_generate_and_score_completions",
            ROLL_OUT: "_generate",
            SAMPLE: "_generate_single_turn",
            TOKENIZE: "_tokenize_prompts",
            SCORE: "_calculate_rewards",
            EPISODES: "_tool_call_loop _get_tool_suffix_ids",
        }
    ),
    "PreferenceTrainer": _rows(
        {
            LOSS: "_compute_kl_logps get_batch_loss_metrics cpo_loss odds_ratio_loss",
            FORWARD: "_shift_right concatenated_forward",
            PREPARE: "build_tokenized_answer tokenize_row",
            LOG: "store_metrics",
        }
    )
    | {
        "_precompute_ref_logps": "with_reference(batch), or give rows the columns of precompute_ref_log_probs",
        "compute_ref_log_probs": "with_reference(batch)",
        "concatenated_inputs": "rows(examples)",
        "get_batch_logps": "sums(logp, batch)",
        "generate_from_model": "LogCompletionsCallback",
    },
    "GRPOTrainer": GROUPED,
    "RLOOTrainer": GROUPED,
    "A2POTrainer": {"_estimate_optimal_values": "estimate_values(sets)", "_get_sequence_logps": LOSS},
    "AsyncTrainer": _rows({TRANSFER: "_init_lora_sync _sync_weight _sync_weight_lora _sync_weight_merged"})
    | {"_log_step_metrics": "postprocess_metrics(metrics)", "_streaming_iter": "micro_batch(inputs, index)"},
    "OnlineDPOTrainer": _rows(
        {
            SCORE: "_calculate_rewards_from_functions",
            FORWARD: "_forward",
            SAMPLE: "_generate _generate_vllm _generate_vllm_colocate _generate_vllm_server",
            ENGINE: "_fix_param_name_to_vllm _move_model_to_vllm _move_model_to_vllm_inner _sync_fsdp1_params_to_vllm "
            "_sync_fsdp2_params_to_vllm",
            TOKENIZE: "process_vision_row",
        }
    )
    | {"_enable_gradient_checkpointing": "gradient_checkpointing_kwargs of the config"},
    "DistillationTrainer": _rows({FORWARD: "_get_last_hidden_state"}),
    "GOLDTrainer": _rows(
        {
            TEACHER: "_build_teacher_vlm_inputs _decode_completion_texts_from_labels _maybe_add_completion_byte_offsets",
            PREPARE: "_ensure_original_text_fields _prepare_dataset_with_original_text",
            TOKENIZE: "_extract_images_and_prompts",
            GENERATE: "_fill_buffer _generate_on_policy_for_slices _materialize_vlm_slice _process_completions_to_buffer",
            SAMPLE: "_generate_non_vllm_for_slices _generate_on_policy_vlm_raw _generate_on_policy_vlm_slice "
            "generate_on_policy_outputs",
            FORWARD: "_get_model_forward_kwargs",
        }
    ),
    "ServerDistillationTrainer": _rows(
        {
            LOSS: f"{SERVED_LOSS} _reduce_divergence_loss",
            GENERATE: "_compute_prompt_length",
            TEACHER: "_get_teacher_token_logprobs_from_server",
        }
    ),
    "IWOPDTrainer": _rows(
        {
            LOSS: f"_compute_iw_opd_loss _compute_local_sparse_top_1_divergence_loss {SERVED_LOSS}",
            GENERATE: "_compute_prompt_length _fill_buffer _get_completion_lengths _store_completions_in_buffer",
            SAMPLE: "_generate_student_completions _generate_with_model",
            TEACHER: "_get_teacher_logits _get_teacher_token_logprobs_from_server _raise_if_local_teacher_tokenizer_mismatch",
        }
    ),
    "SDFTTrainer": SELF_DISTILLED,
    "SDPOTrainer": SELF_DISTILLED
    | _rows(
        {
            LOSS: "_compute_policy_loss",
            LOG: "_record_reward_diagnostics _warn_on_degenerate_diagnostics _warn_on_inactive_self_distillation",
            TOKENIZE: "_tokenize_prompts_untruncated",
        }
    ),
}


# By our class: hooks of its bases that its own way goes around -> what it calls instead.
OF_PROMPTS = {"prepare": "prepare_datasets(train, evaluation)", "rows": GENERATE}
TAKEN = "taken(batch), which gets what the workers wrote, or objective(outputs, batch)"
WORKERS = "reward_funcs, tools and rollout_func, which the workers call, or objective(outputs, batch)"
UNCALLED: dict[str, dict[str, str]] = {
    "GRPOTrainer": OF_PROMPTS,
    "RLOOTrainer": OF_PROMPTS,
    "A2POTrainer": OF_PROMPTS,
    "OnlineDPOTrainer": OF_PROMPTS,
    "PPOTrainer": OF_PROMPTS | {"advantages": "estimate(generation, table, mode)"},
    "AsyncGRPOTrainer": OF_PROMPTS
    | _rows({WORKERS: "generate_and_score generate roll_out sample tokenize score attach_logps advantages"}),
    "AsyncDistillationTrainer": _rows({TAKEN: "rows generate_and_score generate roll_out sample tokenize"}),
}
# Hooks that several turns, or a function that samples, go around.
OF_ONE_TURN = ("sample", "tokenize")


def hook_for(cls: type, name: str) -> str | None:
    """What does the job of a method of TRL's that is never called in a trainer; None where it is called."""
    return next((rows[name] for base in cls.__mro__ if name in (rows := REFUSED.get(base.__name__, {}))), None)


def missing(cls: type, name: str) -> AttributeError:
    """The error for an attribute that a trainer does not have; of a method of TRL's it names the hook."""
    hook = hook_for(cls, name)
    fix = "" if hook is None else f": TRL's method has no twin here. Fix: use {hook} (docs/hooks.md)."
    return AttributeError(f"{cls.__name__!r} object has no attribute {name!r}{fix}", name=name)


def table() -> str:
    """Refused methods as Markdown, for the page on hooks: those of a trainer that one hook replaces in a line."""
    lines = ["| trainer | methods | use instead |", "|---|---|---|"]
    for cls, rows in [*REFUSED.items(), *UNCALLED.items()]:
        for hook in dict.fromkeys(rows.values()):
            names = ", ".join(f"`{name}`" for name, other in rows.items() if other == hook)
            lines.append(f"| `{cls}` | {names} | {hook} |")
    return "\n".join(lines)


def refuse(trainer: Any) -> None:
    """Refuse what would never be called; say what steps on padded dicts cost.

    Args:
        trainer: Of a user's class, before its model is loaded.

    Raises:
        ConfigError: A method of `REFUSED` is overridden: names it, its class, and the hook; or a count that divides nothing.
    """
    rows, kind = {}, type(trainer)
    for base in reversed(kind.__mro__):
        rows |= REFUSED.get(base.__name__, {}) | UNCALLED.get(base.__name__, {})
    driver = trainer.driver
    if driver is not None and (driver.calls_tools or trainer.rollout_func is not None):
        rows |= dict.fromkeys(OF_ONE_TURN, f"{ROLL_OUT}: tools and rollout_func go around a single turn")
    for name, hook in rows.items():
        if owner := user_override(kind, name):
            raise ConfigError(
                f"{owner.__name__} overrides {name}, which is never called here: another method does its job. Fix: use {hook} "
                "instead (docs/hooks.md)."
            )
    if (owner := user_override(kind, "_get_num_items_in_batch")) and not trainer.method.traits.takes_loss_func:
        raise ConfigError(
            f"{owner.__name__} overrides _get_num_items_in_batch, and the loss is no sum over label tokens that it could "
            "divide. Fix: scale what super().compute_loss(...) returns, or override named_counts(batches) (docs/hooks.md)."
        )
    if any(user_override(kind, name) for name in PADDED_STEPS):
        from posttrain.compat import padded_loss

        padded_loss.tell_cost(kind)
        # One dict a micro-batch, as in TRL.
        trainer.method.traits = replace(trainer.method.traits, single_pass=True)
