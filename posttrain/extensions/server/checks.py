"""Checks of a rollout server before a run: its model, its options, and the log-probs that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from posttrain.checks.registry import finding
from posttrain.errors import BadRequest, WeightSyncError
from posttrain.models.heads import adapters_of, causal_lm
from posttrain.types import Finding, Sampling

if TYPE_CHECKING:
    from torch import nn

    from posttrain.methods.config import PostTrainingConfig


# Two log-probs of a token are treated as equal if they differ by less than SAME_MODE nats.
SAME_MODE = 1e-3
PROBE_TOP = 5


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a run for its rollout server. A value of None or 0 means that there is no requirement.

    Attributes:
        shape: Architecture, hidden size, layers and key-value heads of the policy, under the names that servers use.
        completion: Maximum number of tokens per completion.
        at_once: Number of completions per rollout batch.
        truncated: Whether sampling truncates the distribution or applies a repetition penalty.
        devices: UUIDs of the trainer's accelerators.
        repeats_layers: Whether an adapter repeats layers of the base model (``layer_replication``).
    """

    model: str
    revision: str | None
    shape: Mapping[str, Any]
    vocabulary: int
    completion: int
    at_once: int
    temperature: float
    truncated: bool
    devices: tuple[str, ...] = ()
    repeats_layers: bool = False


def needs_of(model: nn.Module, args: PostTrainingConfig) -> Needs:
    """Return the requirements of a trainer with this model and these arguments."""
    from posttrain.models.architecture import shape_of

    base = causal_lm(model)
    text = base.config.get_text_config()
    return Needs(
        model=str(base.config.name_or_path),
        revision=(args.model_init_kwargs or {}).get("revision"),
        shape={"architectures": [type(base).__name__], **shape_of(text)},
        vocabulary=text.vocab_size,
        completion=args.max_completion_length,
        at_once=args.generation_batch_size or 0,
        temperature=args.temperature,
        truncated=args.top_p < 1 or args.top_k > 0 or bool(args.min_p) or args.repetition_penalty != 1,
        devices=tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())),
        repeats_layers=any(vars(config).get("layer_replication") for config in adapters_of(model).values()),
    )


def check_info(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    """Yield a finding for each property of a server that does not fit the requirements of the run."""
    yield from _model(url, info, needs)
    yield from _flags(url, info, needs)
    yield from _seeds(url, info, needs)


def _model(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    differing = {
        name: (info.get(name), value)
        for name, value in needs.shape.items()
        if value is not None and info.get(name) is not None and info[name] != value
    }
    if differing:
        theirs, ours = (", ".join(f"{name}={pair[i]}" for name, pair in differing.items()) for i in (0, 1))
        fix = f"start the server with the trained model: posttrain serve --model {needs.model or 'MODEL'}."
        if needs.repeats_layers:
            fix = "remove layer_replication, or train and serve the model that posttrain.save_merged(model, folder) saves."
        yield finding(
            "PT-S001", "error", f"the server serves {info.get('model')} with {theirs}, but the trainer has {ours}.", url,
            "the trainer's weights cannot be loaded into the server's model, and rollouts would come from another policy.",
            fix,
        )  # fmt: skip
    vocabulary = info.get("vocab_size")
    if vocabulary is not None and vocabulary < needs.vocabulary:
        yield finding(
            "PT-S002", "error", f"the server's vocabulary has {vocabulary} tokens, but the trainer's {needs.vocabulary}.", url,
            "prompts with tokens that were added for training cannot be sent, and the embeddings have different shapes.",
            "save the trained model with its new tokens, and serve this model.",
        )  # fmt: skip
    revision = info.get("revision")
    if revision and needs.revision and revision != needs.revision:
        yield finding(
            "PT-S003", "warning", f"the server loaded revision {revision}, but the trainer loaded {needs.revision}.", url,
            "tokenizers and configs of the two revisions may differ. The weights are pushed in any case.",
            f"start the server with --revision {needs.revision}.",
        )  # fmt: skip


def _flags(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    length, dash = info.get("max_model_len"), "-" if info.get("engine") == "vllm" else "_"
    if length is not None and length <= needs.completion:
        yield finding(
            "PT-S010", "error",
            f"max_model_len={length} leaves no space for a prompt with max_completion_length={needs.completion}.", url,
            "every request would be rejected, or every completion truncated.",
            f"restart the server: {_restart(info, needs)} --max{dash}model{dash}len {needs.completion + 512}.",
        )  # fmt: skip
    if info.get("takes_no_weights"):
        yield finding(
            "PT-S012", "error", f"the server cannot receive weights: {info['takes_no_weights']}.", url,
            "it would sample from its initial weights during the whole run.", f"restart it: {_restart(info, needs)}.",
        )  # fmt: skip
    shared = sorted(set(info.get("device_uuids") or ()) & set(needs.devices))
    if shared:
        yield finding(
            "PT-S013", "error", f"server and trainer both use the accelerator {', '.join(shared)}.", url,
            "they would share its memory, and cannot form a process group to send weights.",
            "give each of them its own accelerator with CUDA_VISIBLE_DEVICES, or set vllm_mode='colocate'.",
        )  # fmt: skip
    slots = info.get("max_num_seqs")
    if slots and needs.at_once > 4 * slots:
        yield finding(
            "PT-S014", "info", f"the server runs {slots} completions at a time, but a generation has {needs.at_once}.", url,
            "completions wait in the server's queue for most of the time.", "increase --max_num_seqs, or add servers.",
        )  # fmt: skip
    quantised = info.get("quantization") or info.get("quantisation")
    if quantised:
        yield finding(
            "PT-S015", "warning", f"the server runs {quantised} weights.", url,
            "rollouts come from a quantized policy. Correcting for the difference reduces the effective sample size.",
            "serve full-precision weights, or watch sampling/sampling_logp_difference.",
        )  # fmt: skip


def _seeds(url: str, info: Mapping[str, Any], needs: Needs) -> Iterator[Finding]:
    if info.get("device") == "cpu" and info.get("chunked_prefill"):
        yield finding(
            "PT-S017", "error", "the server is vLLM on a CPU with chunked prefill (long prompts are read in chunks).", url,
            "every request of a run has a seed, but this vLLM build cannot rewind a seeded generator after a chunk. "
            "The engine would stop with 'CPU Generator does not use offset'.",
            f"restart the server: {_restart(info, needs)} (or vllm serve with --no-enable-chunked-prefill).",
        )  # fmt: skip


def _restart(info: Mapping[str, Any], needs: Needs) -> str:
    """Return a command that starts the same kind of server with the trained model."""
    command = "posttrain vllm-serve" if info.get("engine") == "vllm" else "posttrain serve"
    return f"{command} --model {needs.model or 'MODEL'}"


def probe_logprobs(client: Any, needs: Needs) -> Iterator[Finding]:
    """Check that a server returns log-probs of the sampled distribution, by sending two small requests with different
    temperatures.
    """
    from posttrain.extensions.server.replies import ranked, sampling_body

    prompt = [min(7, needs.vocabulary - 1)]
    settings = [Sampling(1, temperature, top_logps=PROBE_TOP) for temperature in (0.5, 1.0)]
    try:
        choices = [client.complete([prompt], seeds=[0], **sampling_body(setting))[0] for setting in settings]
    except (WeightSyncError, BadRequest):
        # Skip the check if the server cannot sample before the first push, because its weights are incomplete, or if its
        # engine returns only the log-prob of the sampled token.
        return
    pairs = [{i: v for i, v in ranked(choice)[0] if math.isfinite(v)} for choice in choices]
    common = pairs[0].keys() & pairs[1].keys()
    if not common or max(abs(pairs[0][i] - pairs[1][i]) for i in common) >= SAME_MODE:
        return
    url = str(client.base_url)
    yield finding(
        "PT-S011", "error" if needs.temperature != 1.0 else "warning",
        f"the server's log-probs are the same at temperatures 0.5 and 1.0, but this run samples at {needs.temperature}.", url,
        "importance ratios would be wrong unless the run samples at temperature 1.0 without top_k, top_p and min_p.",
        f"restart it: posttrain vllm-serve --model {needs.model} (or vllm serve with --logprobs-mode processed_logprobs).",
    )  # fmt: skip
