"""Nash-MD: learn to be preferred to a mixture of oneself and the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.online_preference import OnlinePreferenceConfig, OnlinePreferenceTrainer
from posttrain.errors import ConfigError, ModelError
from posttrain.losses.reduce import sequence_sum
from posttrain.metrics import Metric, mean
from posttrain.models import parallel
from posttrain.models.forward import causal_lm, learns_prompts
from posttrain.rollouts.base import Capabilities, RolloutEngine, check_followed, check_requests, check_rope, evaluating
from posttrain.rollouts.batch import RolloutBatch
from posttrain.rollouts.sampling import sample
from posttrain.types import Batch, ModelOutputs, Request, Rollout, Sampling

__all__ = [
    "MixtureEngine",
    "NashMDConfig",
    "NashMDTrainer",
    "nash_md_terms",
]


# Fields of `Sampling` that a mixture is not drawn with.
UNKNOWN = ("min_new_tokens", "stop_strings", "logit_bias", "no_repeat_ngram", "guide", "top_logps")


@contextmanager
def _itself(model: nn.Module) -> Iterator[nn.Module]:
    yield model


class MixtureEngine(RolloutEngine):
    """Draws from ``softmax(c z_ref + (1 - c) z_policy)``: the policy at c = 0, the reference at c = 1.

    Both models read a token once: a prompt when it is prefilled, a completion token when it was drawn. A model whose share
    is 0 is not run at all. Rows that have stopped leave the batch.

    Args:
        model: The policy, a causal language model, possibly with adapters.
        reference: The other model; or a function that gives a context in which the model it yields is the reference (the
            same weights with their adapters off, say).
        pad_token_id: Written to padding.
        mixture_coef: c in [0, 1]; may be set between calls.
        max_rows: Sequences decoded together; None is 64 on a CPU and 256 on a GPU.

    Raises:
        ModelError: The policy learns virtual tokens (prompt tuning).

    Reference: Nash learning from human feedback, arXiv:2312.00886, section 7 (the regularised policy).
    """

    name = "mixture"
    capabilities = Capabilities(in_process=True, unsupported=UNKNOWN, per_request_sampling=False)

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | Callable[[], AbstractContextManager[nn.Module]],
        *,
        pad_token_id: int,
        mixture_coef: float = 0.5,
        max_rows: int | None = None,
    ) -> None:
        if learns_prompts(model):
            raise ModelError(
                "the mixture of two models cannot be sampled with prompt tuning. Use an adapter like LoRA."
            )
        self.model: Any = model
        self.reference: Any = functools.partial(_itself, reference) if isinstance(reference, nn.Module) else reference
        self.pad_token_id = pad_token_id
        self.mixture_coef = mixture_coef
        device = next(model.parameters()).device
        self.max_rows = max_rows or (64 if device.type == "cpu" else 256)
        self._stream = torch.Generator().manual_seed(0)

    @staticmethod
    def check(sampling: Sampling, requests: Sequence[Request] = ()) -> None:
        """Refuse settings that the policy's own completions would follow and the mixture's would not."""
        check_followed(requests, sampling, "the mixture of two models", UNKNOWN, fix="Leave it out")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """See `posttrain.rollouts.base.RolloutEngine.generate`."""
        if not 0 <= self.mixture_coef <= 1:
            raise ConfigError(f"mixture_coef={self.mixture_coef} must be in [0, 1]: 0 is the policy, 1 the reference.")
        text = causal_lm(self.model).config.get_text_config()
        check_requests(requests, sampling, getattr(text, "max_position_embeddings", None), text.vocab_size)
        check_rope(requests, sampling, self.model, "the mixture of two models")
        self.check(sampling, requests)
        prompts = [list(request.prompt_ids) for request in requests for _ in range(request.n)]
        generator = self._stream if sampling.seed is None else torch.Generator().manual_seed(sampling.seed)
        uniform = torch.rand(len(prompts), sampling.max_new_tokens, generator=generator, dtype=torch.float64)
        rollouts: list[Rollout] = []
        with evaluating(self.model):
            for start in range(0, len(prompts), self.max_rows):
                rows = slice(start, start + self.max_rows)
                rollouts += _Decoding(self, prompts[rows], uniform[rows], sampling).to_the_end()
        return rollouts

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The weights are the trainer's own: only the version changes."""
        self.version = version

    def close(self) -> None:
        """Nothing outlives a call."""


class _Decoding:
    """One batch from its prompts to its last token."""

    def __init__(self, engine: MixtureEngine, prompts: list[list[int]], uniform: Tensor, sampling: Sampling) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        device = next(engine.model.parameters()).device
        width = max(map(len, prompts))
        pad = engine.pad_token_id
        self.uniform = uniform.to(device)
        self.inputs = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        self.mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        self.caches: dict[str, Any] = {"policy": None, "reference": None}
        self.live = list(range(len(prompts)))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logps: list[list[float]] = [[] for _ in prompts]

    def to_the_end(self) -> list[Rollout]:
        """All rows, in their order."""
        for step in range(self.sampling.max_new_tokens):
            history = None
            if self.sampling.repetition_penalty != 1.0:
                history = [self.prompts[row] + self.tokens[row] for row in self.live]
            drawn, logp = sample(self._logits(), self.sampling, self.uniform[self.live, step], history)
            for row, token, value in zip(self.live, drawn.tolist(), logp.tolist(), strict=True):
                self.tokens[row].append(token)
                self.logps[row].append(value)
            self._advance(drawn)
            if not self.live:
                break
        return [self._rollout(row) for row in range(len(self.prompts))]

    def _logits(self) -> Tensor:
        """``(live, V)`` mixed logits of the next token."""
        share = self.engine.mixture_coef
        mixed: Tensor | None = None
        if share < 1:
            mixed = (1 - share) * self._run(self.engine.model, "policy")
        if share > 0:
            with self.engine.reference() as reference:
                theirs = share * self._run(reference, "reference")
            mixed = theirs if mixed is None else mixed + theirs
        assert mixed is not None
        return mixed

    def _run(self, model: nn.Module, name: str) -> Tensor:
        inner: Any = causal_lm(model)
        positions = (self.mask.cumsum(1) - 1).clamp_min(0)[:, -self.inputs.shape[1] :]
        output = inner(
            input_ids=self.inputs,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.caches[name],
            use_cache=True,
            logits_to_keep=1,
        )
        self.caches[name] = output.past_key_values
        return output.logits[:, -1].float()

    def _advance(self, drawn: Tensor) -> None:
        """The drawn tokens are the next inputs; rows that stopped leave every tensor."""
        stops = set(self.sampling.stop_token_ids)
        kept = [i for i, row in enumerate(self.live) if self.tokens[row][-1] not in stops]
        self.inputs = drawn[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(drawn)[:, None]], 1)
        if len(kept) == len(self.live):
            return
        index = torch.tensor(kept, dtype=torch.long, device=drawn.device)
        self.live = [self.live[i] for i in kept]
        self.inputs, self.mask = self.inputs[index], self.mask[index]
        for cache in self.caches.values():
            if cache is not None and kept:
                cache.batch_select_indices(index)

    def _rollout(self, row: int) -> Rollout:
        stopped = self.tokens[row][-1] in self.sampling.stop_token_ids
        return Rollout(
            self.prompts[row],
            self.tokens[row],
            self.logps[row],
            "stop" if stopped else "length",
            self.engine.version,
        )


@dataclass
class NashMDConfig(OnlinePreferenceConfig):
    """Arguments of `NashMDTrainer`: those of `OnlinePreferenceConfig`, and the mixture."""

    per_epoch: ClassVar[tuple[str, ...]] = ("beta", "mixture_coef")
    in_process_because: ClassVar[str | None] = (
        "Nash-MD samples from a mixture of the policy and the reference, in process"
    )

    mixture_coef: list[float] = field(
        default_factory=lambda: [0.5],
        metadata={"help": "Share of the reference in the opponent, in [0, 1]; several: by epoch."},
    )

    def in_range(self, name: str, value: float) -> bool:
        """A share may be 0 (the policy itself) or 1 (the reference)."""
        return 0 <= value <= 1 if name == "mixture_coef" else super().in_range(name, value)


def nash_md_terms(logp: Tensor, ref_logp: Tensor, preference: Tensor, batch: Batch, *, beta: float) -> Tensor:
    """``beta sum_t sg[l_t - l_ref,t] l_t - (p - 1/2) sum_t l_t``, ``(S,)``.

    The gradient is that of ``beta KL(policy | reference)`` by its score function, token by token, and of the probability
    to be preferred.

    Args:
        logp: ``(B, T)`` under the policy.
        ref_logp: ``(B, T)`` under the reference.
        preference: ``(S,)`` p - 1/2, how much the completion is preferred to the opponent's.
        batch: Names the tokens of each sequence.
        beta: Weight of the KL.

    Reference: Nash learning from human feedback, arXiv:2312.00886, algorithm 1.
    """
    forest = (batch.loss_mask, batch.sequence, batch.num_sequences)
    charged = sequence_sum((logp - ref_logp).detach() * logp, *forest)
    return beta * charged - preference * sequence_sum(logp, *forest)


class NashMDTrainer(OnlinePreferenceTrainer):
    """Samples one completion from the policy and one from its geometric mixture with the reference; trains the first.

    The mixture's completion enters only through the probability that it loses, ``sigmoid(s - s')`` of their rewards, or
    what a judge says.

    Reference: Nash learning from human feedback, arXiv:2312.00886.

    >>> trainer = NashMDTrainer(
    ...     model, reward_funcs=reward, args=NashMDConfig("runs/nash_md"), train_dataset=prompts, processing_class=tok
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[NashMDConfig]] = NashMDConfig
    keep_groups_together: ClassVar[bool] = False
    two_samplers: ClassVar[bool] = True
    one_reward: ClassVar[bool] = True
    soft_judge: ClassVar[bool] = True
    _tag_names: ClassVar[list[str]] = ["posttrain", "nash-md"]
    _name: ClassVar[str] = "Nash-MD"
    _suffix: ClassVar[str] = "NashMD"
    _paper: ClassVar[dict[str, str]] = {"title": "Nash Learning from Human Feedback", "id": "2312.00886"}
    args: NashMDConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.reference is not None
        policy = self.accelerator.unwrap_model(self.model)
        reference = self.reference.copy or functools.partial(self.reference.active, policy)
        self.opponent = MixtureEngine(policy, reference, pad_token_id=self.pad_token_id)
        self.opponent.check(self.sampling("train"))

    def sample_opponent(self, prompts: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """One completion a prompt from the mixture."""
        self.opponent.mixture_coef = self.scheduled("mixture_coef")
        with self.inference(), parallel.whole_parameters(self.model_wrapped, self.accelerator):
            return self.opponent.generate([Request(prompt) for prompt in prompts], sampling)

    def trained(self, generation: RolloutBatch, mode: str) -> list[int]:
        """The policy's own completions."""
        return list(range(0, len(generation.rollouts), 2 if mode == "train" else 1))

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """As every online trainer; the opponent's completions have done their part and are left behind."""
        whole = super().generate_and_score(examples, mode)
        if mode == "eval":
            return whole
        own = self.trained(whole, mode)
        whole.columns["opponent_scores"] = [whole.columns["scores"][i ^ 1] for i in range(len(whole.rollouts))]
        return dataclasses.replace(
            whole,
            examples=[whole.examples[i] for i in own],
            rollouts=[whole.rollouts[i] for i in own],
            completions=[whole.completions[i] for i in own],
            columns={name: [column[i] for i in own] for name, column in whole.columns.items()},
            token_columns={name: [column[i] for i in own] for name, column in whole.token_columns.items()},
        )

    def preference(self, gap: Tensor) -> Tensor:
        """``p - 1/2``: a judge's gap is ``p - (1 - p)``, a reward's goes through a sigmoid."""
        return gap / 2 if self.judge is not None else torch.sigmoid(gap) - 0.5

    def log_scores(self, scores: Tensor, known: Tensor, ended: Tensor, mode: str) -> None:
        """How often each of the two samplers ended."""
        if mode == "eval":
            return super().log_scores(scores, known, ended, mode)
        names = {"val/model_contain_eos_token": ended[::2], "val/ref_contain_eos_token": ended[1::2]}
        self.log_metrics_now({name: mean(values.float()) for name, values in names.items()})

    def pair_loss(
        self, outputs: ModelOutputs, batch: Batch, logp: Tensor, ratio: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """See `nash_md_terms`; ``rewards/*`` are raw scores, ``logps/*`` those of the policy's completion under both models."""
        assert outputs.logp is not None and batch.ref_logp is not None and batch.advantages is not None
        terms = nash_md_terms(outputs.logp, batch.ref_logp, batch.advantages, batch, beta=self.scheduled("beta"))
        known = batch.columns["compared"].bool()
        metrics = {
            "loss/score": mean(batch.advantages * logp, known),
            "loss/kl": mean(ratio, known),
            "objective/entropy": mean(-logp, known),
            "rewards/probabilities": mean(batch.advantages + 0.5, known),
            "rewards/chosen": mean(batch.columns["scores"], known),
            "rewards/rejected": mean(batch.columns["opponent_scores"], known),
            "logps/chosen": mean(logp, known),
            "logps/rejected": mean(logp - ratio, known),
            "rewards/margins": mean(ratio, known),
            "rewards/accuracies": mean((ratio > 0).float(), known),
            "mixture_coef": mean(self.scheduled("mixture_coef")),
        }
        return terms, metrics
