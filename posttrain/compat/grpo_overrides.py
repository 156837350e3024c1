"""What subclasses of `GRPOTrainer` and `RLOOTrainer` override by TRL's private names takes effect."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.data.forest import collate, split_by_sequence
from posttrain.errors import ConfigError, RewardError, did_you_mean
from posttrain.losses.policy import entropy_mask, off_policy_mask, vespo_weight
from posttrain.models import parallel
from posttrain.models.attention import padded_layout
from posttrain.models.forward import forward
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.episodes.driver import EpisodeDriver
from posttrain.training.config import user_override
from posttrain.types import Batch, Rollout, Row, Sampling

LOGPS = {  # Name in the dict of padded tensors -> column of a generation.
    "old_per_token_logps": "old_logp",
    "ref_per_token_logps": "ref_logp",
    "sampling_per_token_logps": "rollout_logp",
}
NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
KNOWN = (*NEEDED, "tool_mask", "num_items_in_batch", *LOGPS)


def _pad(lists: list[list[Any]], value: float, *, left: bool = False, dtype: Any = torch.long) -> Tensor:
    width = max(map(len, lists), default=0)
    rows = [[value] * (width - len(x)) + list(x) if left else list(x) + [value] * (width - len(x)) for x in lists]
    return torch.tensor(rows, dtype=dtype).view(len(lists), width)


def to_padded(generation: RolloutBatch, *, pad_token_id: int, skip_truncated: bool, accelerator: Any) -> dict[str, Any]:
    """Prompts padded left, completions right, as ``(n, width)`` tensors with their masks, log-probs and advantages.

    Args:
        generation: Of this rank, scored.
        pad_token_id: Written to padding.
        skip_truncated: Whether completions that hit the limit are masked.
        accelerator: Adds ``num_items_in_batch`` up over ranks.
    """
    rollouts = generation.rollouts
    masks = [generation.loss_mask(i, skip_truncated) for i in range(len(rollouts))]
    whole = [[int(any(m))] * len(m) for m in masks]  # A masked completion is masked altogether.
    output: dict[str, Any] = {
        "prompt_ids": _pad([r.prompt_ids for r in rollouts], pad_token_id, left=True),
        "prompt_mask": _pad([[1] * len(r.prompt_ids) for r in rollouts], 0, left=True),
        "completion_ids": _pad([r.token_ids for r in rollouts], pad_token_id),
        "completion_mask": _pad(whole, 0),
        "advantages": torch.tensor(generation.columns["advantages"]),
        "num_items_in_batch": torch.tensor(parallel.all_reduce_sum([float(sum(map(sum, masks)))], accelerator)[0]),
    }
    if any(r.tool_mask for r in rollouts):
        output["tool_mask"] = _pad([r.tool_mask or [1] * len(r.token_ids) for r in rollouts], 1)
    for name, column in LOGPS.items():
        if column in generation.token_columns:
            output[name] = _pad(generation.token_columns[column], 0.0, dtype=torch.float32)
    return output


def from_padded(
    output: dict[str, Any], examples: list[dict[str, Any]], known: RolloutBatch | None, args: Any
) -> RolloutBatch:
    """What a subclass made of the padded tensors, as a generation that is trained as it is.

    Args:
        output: See `to_padded`; ``advantages`` may be ``(n,)`` or one a token, ``(n, width)``.
        examples: Rows they answer.
        known: The generation that `to_padded` got, for the step it was sampled at.
        args: `GRPOConfig`.

    Raises:
        ConfigError: A tensor is missing, or is there and would be ignored.
    """
    if missing := [name for name in NEEDED if name not in output]:
        raise ConfigError(f"_generate_and_score_completions returned no {', '.join(missing)}.")
    for name in output:
        if name not in KNOWN:
            raise ConfigError(
                f"_generate_and_score_completions returned {name!r}, which nothing reads here{did_you_mean(name, KNOWN)}. To "
                "bring a number a completion to the objective, put it into generation.columns in advantages()."
            )
    masks = output["completion_mask"].long()
    lengths = [int(m.nonzero().max()) + 1 if m.any() else 0 for m in masks]
    trained = masks if output.get("tool_mask") is None else masks * output["tool_mask"].long()
    rollouts = [
        Rollout(
            output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist(),
            output["completion_ids"][i, :n].tolist(),
            [],
            "stop",  # Whatever was to be masked is masked already.
            tool_mask=trained[i, :n].tolist(),
        )
        for i, n in enumerate(lengths)
    ]
    generation = RolloutBatch(examples, rollouts, [None] * len(rollouts), born=known.born if known else 0)
    advantages = output["advantages"].float()
    if advantages.dim() == 1:
        generation.columns["advantages"] = advantages.tolist()
    elif getattr(args, "loss_type", "vespo") == "vespo" or args.off_policy_mask_threshold is not None:
        raise ConfigError(
            f"advantages of shape {tuple(advantages.shape)}: RLOO, loss_type='vespo' and off_policy_mask_threshold need one a "
            "sequence. Fix: return advantages of shape (n,)."
        )
    else:
        generation.token_columns["advantages"] = [advantages[i, :n].tolist() for i, n in enumerate(lengths)]
    for name, column in LOGPS.items():
        if output.get(name) is not None:
            generation.token_columns[column] = [output[name][i, :n].tolist() for i, n in enumerate(lengths)]
    return generation


def padded_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, keep: int, *, needs: frozenset[str], **settings: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probs and entropies ``(B, keep)`` of the last ``keep`` columns of padded rows, 0 on padding, and the router's term.

    ``settings`` are those of `forward`: ``temperature``, ``chunk_size``.
    """
    real = attention_mask.bool()
    tail = real[:, -keep:]
    rows = []
    for ids, inside in zip(input_ids, real, strict=True):
        completion = ids[-keep:][inside[-keep:]].tolist()
        rows.append(Row(ids[:-keep][inside[:-keep]].tolist(), [completion], [[1] * len(completion)]))
    [batch] = collate(rows, pad_token_id=0, layout=padded_layout(model), together=True)
    batch = batch.to(input_ids.device)
    out = forward(model, batch, needs, **settings)

    def placed(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        pieces = split_by_sequence(values, batch)
        order = sorted(range(len(rows)), key=batch.origin.__getitem__)
        flat = torch.cat([pieces[k] for k in order])
        return torch.zeros(tail.shape, dtype=flat.dtype, device=flat.device).masked_scatter(tail, flat)

    logp = placed(out.logp)
    assert logp is not None
    return logp, placed(out.entropy), out.aux_loss


SINGLE_TURN = ("_generate_single_turn", "_tokenize_prompts")  # Tools and rollout functions go other ways.


TAKEN = (
    "_generate_and_score_completions",
    "_generate",
    "_generate_single_turn",
    "_tokenize_prompts",
    "_calculate_rewards",
)


if TYPE_CHECKING:
    # What stands behind it when it is put in place, so that its calls of `super` are known.
    from posttrain.algorithms.grpo.trainer import GRPOTrainer as Behind
else:
    Behind = object


class GRPOOverrides(Behind):
    """Calls methods by TRL's names where ours would be called, and gives a subclass's ``super()`` what TRL's would."""

    args: Any
    rewards: Any
    processing_class: Any
    stop_ids: tuple[int, ...]
    pad_token_id: int
    _now: tuple[list[dict[str, Any]], str] | None = None
    _last: RolloutBatch | None = None
    _scored: RewardTable | None = None
    _sampling_now: Sampling | None = None
    _foreign_logps = False
    driver: EpisodeDriver | None
    rollout_func: Any
    _extra: dict[str, list[Any]]

    @property
    def cuts_prompts(self) -> bool:
        """A subclass that tokenises prompts itself may shorten them."""
        return user_override(self, "_tokenize_prompts") is not None

    @property
    def may_read_images(self) -> bool:
        """A subclass that tokenises or generates by itself may show the model more than text."""
        own = ("_tokenize_prompts", "_generate_single_turn", "_generate")
        return super().may_read_images or any(user_override(self, name) for name in own)

    def check_turns(self) -> None:
        """Refuse overrides that several turns would go around."""
        if self.driver is None or not (self.driver.calls_tools or self.rollout_func):
            return
        for name in SINGLE_TURN:
            if owner := user_override(self, name):
                raise ConfigError(
                    f"{owner.__name__} overrides {name}, which tools, environments and rollout_func do not call. Override "
                    "_generate(prompts) or roll_out(examples, mode)."
                )

    # Overridden, and in force ------------------------------------------------------------------------------------

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Through `_generate_and_score_completions` where a subclass has its own."""
        if not user_override(self, "_generate_and_score_completions"):
            return super().generate_and_score(examples, mode)
        self._now = examples, mode
        output = self._generate_and_score_completions(examples)
        return from_padded(output, examples, self._last, self.args)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A generation as padded tensors; what a subclass changes in them is what is trained."""
        mode = self._now[1] if self._now else "train"
        self._last = super().generate_and_score(inputs, mode)
        return to_padded(
            self._last,
            pad_token_id=self.pad_token_id,
            skip_truncated=self.args.mask_truncated_completions,
            accelerator=self.accelerator,
        )

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """Through `_generate` where a subclass has its own."""
        if not user_override(self, "_generate"):
            return super().roll_out(examples, mode)
        self._now = examples, mode
        prompt_ids, completion_ids, tool_mask, completions, logps, *more = self._generate(
            [e["prompt"] for e in examples]
        )
        rollouts = self._rollouts(prompt_ids, completion_ids, logps, tool_mask)
        if more and more[0]:
            self._extra = {**self._extra, **more[0]}
        return rollouts, completions

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Prompt ids, completion ids, tool mask, completions, log-probs, extra columns, images, tool images."""
        examples, mode = self._now or ([{"prompt": prompt} for prompt in prompts], "train")
        same = len(examples) == len(prompts)
        rows = [{**(examples[i] if same else {}), "prompt": prompt} for i, prompt in enumerate(prompts)]
        rollouts, completions = super().roll_out(rows, mode)
        masks = [r.tool_mask for r in rollouts]
        filled = [m or [1] * len(r.token_ids) for m, r in zip(masks, rollouts, strict=True)]
        logps = None if self.engine_is_policy else [r.logp for r in rollouts]
        ids = [r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts]
        return *ids, filled if any(masks) else None, completions, logps, {}, None, None

    def sample(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """Through `_generate_single_turn` where a subclass has its own."""
        self._sampling_now = sampling
        if not user_override(self, "_generate_single_turn"):
            return super().sample(prompts, sampling)
        known = inspect.signature(self._generate_single_turn).parameters
        extra = {"num_generations": self.args.num_generations} if "num_generations" in known else {}
        given: Any = self._generate_single_turn(prompts, None, {}, **extra)
        completion_ids, logps = given if isinstance(given, tuple) else (given, None)
        return self._rollouts(prompts, completion_ids, logps, None)

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any = None, multimodal_fields: Any = None, **_: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Completion ids, and log-probs where they are not those of the weights that are trained."""
        sampling = self._sampling_now or self.sampling("train")
        rollouts = super().sample(prompt_ids, sampling)
        logps = None if self.engine_is_policy else [r.logp for r in rollouts]
        return [r.token_ids for r in rollouts], logps

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """Through `_tokenize_prompts` where a subclass has its own."""
        if not user_override(self, "_tokenize_prompts"):
            return super().tokenize(examples)
        self._now = examples, "train"
        given: Any = self._tokenize_prompts([example["prompt"] for example in examples])
        return given[0] if isinstance(given, tuple) else given

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Prompt ids, images, multimodal fields."""
        examples = self._now[0] if self._now and len(self._now[0]) == len(prompts) else [{}] * len(prompts)
        rows = [{**example, "prompt": prompt} for example, prompt in zip(examples, prompts, strict=True)]
        return super().tokenize(rows), None, {}

    def score(self, generation: RolloutBatch, mode: str) -> RewardTable:
        """Through `_calculate_rewards` where a subclass has its own."""
        if not (owner := user_override(self, "_calculate_rewards")):
            return super().score(generation, mode)
        self._last, self._now, self._scored = generation, (generation.examples, mode), None
        ids = [rollout.token_ids for rollout in generation.rollouts]
        prompts = [example["prompt"] for example in generation.examples]
        values = self._calculate_rewards(generation.examples, prompts, generation.completions, ids)
        counts = parallel.all_gather_objects([len(ids)], self.accelerator)
        values = torch.as_tensor(values, dtype=torch.float32).cpu()
        if values.shape != (sum(counts), len(self.rewards.names)):
            raise RewardError(
                f"{owner.__name__}._calculate_rewards returned rewards of shape {tuple(values.shape)}; it must be one row a "
                f"completion of all processes and one column a function, {(sum(counts), len(self.rewards.names))}."
            )
        start = sum(counts[: self.accelerator.process_index])
        table = self._scored or RewardTable(values, list(self.rewards.names), self.rewards.weights, start=start)
        return dataclasses.replace(table, values=values.clone())

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:
        """``(n, K)`` rewards of all processes' rows, NaN where a function did not apply."""
        if self._last is None or self._now is None:
            raise ConfigError("_calculate_rewards scores what the trainer generated, and it has generated nothing yet.")
        rollouts = [
            dataclasses.replace(rollout, token_ids=ids)
            for rollout, ids in zip(self._last.rollouts, completion_ids_list, strict=True)
        ]
        examples = [{**example, "prompt": prompt} for example, prompt in zip(inputs, prompts, strict=True)]
        asked = dataclasses.replace(self._last, examples=examples, rollouts=rollouts, completions=completions)
        self._scored = super().score(asked, self._now[1])
        return self._scored.values

    def _rollouts(self, prompts: Any, completions: Any, logps: Any, tool_mask: Any) -> list[Rollout]:
        """What an old-style method returned, as rollouts; a last token that ends a turn, or pads, ended it."""
        self._foreign_logps = logps is not None
        texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
        ends, found = {*self.stop_ids, self.pad_token_id}, []
        for i, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
            reason: Any = "stop" if ids and ids[-1] in ends else "length"
            mask = None if tool_mask is None else list(tool_mask[i])
            logp = [] if logps is None else [float(x) for x in logps[i]]
            found.append(Rollout(list(prompt), list(ids), logp, reason, tool_mask=mask, text=texts[i]))
        return found

    @property
    def engine_is_policy(self) -> bool:
        """Log-probs that a subclass returned are those of another sampler."""
        return not self._foreign_logps and super().engine_is_policy

    # Called ------------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        return self.compute_loss(model, inputs)

    def compute_liger_loss(self, unwrapped_model: nn.Module, inputs: Batch) -> Tensor:
        """The loss of one forest; it is computed in chunks without any kernel."""
        return self.compute_loss(unwrapped_model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(B, logits_to_keep)`` log-probs and entropies of padded rows, 0 on padding; by the forward that trains."""
        needs = frozenset(
            {"logp"} | ({"entropy"} if compute_entropy else set()) | ({"aux"} if compute_aux_loss else set())
        )
        settings = {"temperature": self.args.temperature, "chunk_size": self.args.logits_chunk_size}
        return padded_logps(model, input_ids, attention_mask, logits_to_keep, needs=needs, **settings)

    @staticmethod
    def get_off_policy_mask(
        advantages: Tensor,
        per_token_logps: Tensor,
        sampling_per_token_logps: Tensor,
        mask: Tensor,
        off_policy_threshold: float,
    ) -> Tensor:
        """``(B, 1)`` 1 on sequences to keep; see `posttrain.losses.policy.off_policy_mask`."""
        forest = _rows_as_sequences(mask)
        keep = off_policy_mask(
            per_token_logps, sampling_per_token_logps, advantages.flatten(), *forest, threshold=off_policy_threshold
        )
        return keep[:, None].to(mask.dtype)

    @staticmethod
    def get_gamma_weights(
        advantages: Tensor,
        log_ratio_per_token: Tensor,
        mask: Tensor,
        importance_sampling_ratio: Tensor | None,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> Tensor:
        """``(B, 1)`` weights of VESPO; see `posttrain.losses.policy.vespo_weight`."""
        signs = {"pos": (k_pos, lambda_pos), "neg": (k_neg, lambda_neg)}
        forest = _rows_as_sequences(mask)
        weight = importance_sampling_ratio
        return vespo_weight(log_ratio_per_token, advantages.flatten(), *forest, **signs, rollout_weight=weight)[:, None]

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """``(B, T)`` tokens whose entropy reaches the quantile ``threshold`` of all ranks' tokens."""
        gather = self._gather_entropies if self.accelerator.num_processes > 1 else None
        return entropy_mask(entropies, mask.bool(), quantile=1.0 - threshold, gather=gather)


def _rows_as_sequences(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Padded rows as a forest of one sequence a row."""
    rows = torch.arange(mask.shape[0], device=mask.device)
    return mask.bool(), rows[:, None].expand(mask.shape), mask.shape[0]
