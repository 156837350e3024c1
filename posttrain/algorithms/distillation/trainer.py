"""`DistillationTrainer`: a student learns a teacher's next-token distributions, on its own tokens or on others'."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.algorithms.distillation.config import DistillationConfig, logit_width
from posttrain.algorithms.distillation.data import (
    as_rollout,
    cut_prompt,
    privileged_prompt,
    tokenized_answers,
    with_prompt_column,
)
from posttrain.algorithms.distillation.objective import Comparison, distillation_objective
from posttrain.algorithms.distillation.scores import ScoreFile
from posttrain.algorithms.distillation.teacher import (
    ModelTeacher,
    ServedModel,
    ServerTeacher,
    TokenScores,
    frozen,
    load_teacher,
    sparse_view,
)
from posttrain.algorithms.grpo.objective import grpo_objective
from posttrain.checks.tokenizers import compare_tokenizers, require_same_tokens
from posttrain.data.chat import terminal_token_ids
from posttrain.errors import ConfigError, DataError
from posttrain.losses.advantages import group_advantages
from posttrain.losses.reduce import spread
from posttrain.metrics import mean
from posttrain.models import load
from posttrain.models.forward import causal_lm, forward, install_token_head
from posttrain.models.reference import Reference
from posttrain.report.sync_reference import SyncRefModelCallback
from posttrain.rewards.runner import RewardTable
from posttrain.rollouts.batch import RolloutBatch, completions_for_rewards
from posttrain.training.config import choose_layout
from posttrain.training.online import OnlineTrainer
from posttrain.training.prompts import PromptSource
from posttrain.types import Batch, LossTerms, ModelOutputs, Request, Rollout, Row

__all__ = ["DistillationTrainer"]

logger = logging.getLogger(__name__)


def _unrewarded(completions: list[Any], **_: Any) -> list[None]:
    """Stands where online trainers have reward functions; it is never called."""
    raise AssertionError("distillation without rewards scores nothing")


class DistillationTrainer(OnlineTrainer):
    """Distillation with four axes: whose tokens (``lmbda``, ``seq_kd``), which divergence, which teacher, what else.

    Args:
        model: The student: hub id, folder, model or peft model.
        teacher_model: Hub id, folder or model; None where ``args`` names the teacher.
        args: `DistillationConfig` or one of the presets.
        train_dataset: ``prompt`` (and ``completion``), or ``messages``.
        eval_dataset: Likewise.
        processing_class: The student's tokenizer; None loads the model's.
        teacher_processing_class: The teacher's; None loads that of a teacher given by id, else the student's is taken for it.
        teacher_server: Client of a server that scores, see `ScoringServer`.

    Reference: GKD, arXiv:2306.13649.

    >>> trainer = DistillationTrainer(student, teacher, train_dataset=prompts)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class: ClassVar[type[Any]] = DistillationConfig
    compared: ClassVar[bool] = False  # ``beta`` is the divergence's, and no tie to a reference.
    cuts_prompts = True
    takes_rewards: ClassVar[bool] = False  # Whether GRPO's loss stands beside the divergence.
    privileged: ClassVar[bool] = False  # Whether the teacher reads another prompt, which `facts` gives.
    may_read_images = False
    _tag_names: ClassVar[list[str]] = ["posttrain", "distillation"]
    _name: ClassVar[str] = "Distillation"
    _suffix: ClassVar[str] = "Distillation"
    args: Any

    def __init__(
        self,
        model: str | nn.Module,
        teacher_model: str | nn.Module | None = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        teacher_processing_class: Any = None,
        teacher_server: Any = None,
        reward_funcs: Any = None,
        **kwargs: Any,
    ) -> None:
        if reward_funcs is not None and not self.takes_rewards:
            raise ConfigError(
                f"{type(self).__name__} reads no rewards. Fix: MiniLLM or SDPO, or leave reward_funcs out."
            )
        # Completions that are being trained or evaluated, by number: what a teacher needs to know of them.
        self.kept: dict[str, dict[int, Any]] = {"train": {}, "eval": {}}
        self.columns: int | None = None
        data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset, "processing_class": processing_class}
        if isinstance(teacher_model, nn.Module) and teacher_model is model:
            load_teacher(teacher_model, args, teacher_model)
        super().__init__(model, reward_funcs or _unrewarded, args, **data, **kwargs)
        self.axes = self.args.axes()
        self.score_file: ScoreFile | None = None
        self.teacher: ModelTeacher | None = None
        self.teacher_model: nn.Module | None = None
        self._make_teacher(teacher_model, teacher_processing_class, teacher_server)
        if self.keeps_completions:
            self.args.balance_ranks = False  # What is known of a completion stays on its rank.

    # Teachers ----------------------------------------------------------------------------------------------------

    def _make_teacher(self, given: Any, tokenizer: Any, server: Any) -> None:
        args = self.args
        self.server: ServerTeacher | None = None
        if self.axes.support == "none":
            return
        if args.teacher_scores:
            self.score_file = ScoreFile(args.teacher_scores)
            self.score_file.check(self.train_dataset, self.processing_class, temperature=self.axes.teacher_temperature)
        elif args.teacher_model_server_url or server is not None:
            self.server = self._make_server(server)
        elif args.teacher_model_kind != "model":
            self._own_teacher(given)
        else:
            self._other_teacher(given, tokenizer)

    def _make_server(self, client: Any) -> ServerTeacher:
        client = ServedModel(self.args.teacher_model_server_url) if client is None else client
        probe = next(row.prompt_ids for row in self._rows_of([next(iter(self.train_dataset))]))
        expected = self.args.teacher_model_name_or_path
        return ServerTeacher(client, self.axes, expected=expected, probe=[*probe, *probe][:8])

    def _own_teacher(self, given: Any) -> None:
        """The student's weights, now or then."""
        if given is not None:
            raise ConfigError(
                f"teacher_model with teacher_model_kind={self.args.teacher_model_kind!r}: there would be "
                "two teachers. Leave one out."
            )
        kind, own = self.args.teacher_model_kind, None
        if kind != "live":
            own = Reference(self.model, fresh_adapter=self.fresh_adapter and kind == "base")
        if own is not None and own.copy is not None:
            own.copy.to(self.args.device)
            install_token_head(own.copy)
        if kind == "ema" and own is not None:
            if own.copy is None:
                raise ConfigError(
                    "teacher_model_kind='ema' with an adapter: averages of factors are not averages of their product. Fix: "
                    "teacher_model_kind='base', or train all weights."
                )
            self.add_callback(SyncRefModelCallback(own.copy, self.accelerator))

        @contextmanager
        def running() -> Any:
            with self.inference() as policy:
                if own is None:
                    yield policy
                else:
                    with own.active(policy) as model:
                        yield model

        self.teacher_model = None if own is None else own.copy
        self.teacher = ModelTeacher(running, self.layout, True, self.pad_token_id)

    def _other_teacher(self, given: Any, tokenizer: Any) -> None:
        name = self.args.teacher_model_name_or_path if given is None else given
        if tokenizer is None and isinstance(name, str):
            tokenizer = load.load_tokenizer(name, trust_remote_code=self.args.trust_remote_code)
        model = load_teacher(given, self.args, self.model).to(self.args.device)
        install_token_head(model)
        self.teacher_model, self.teacher_tokenizer = model, tokenizer or self.processing_class
        self.check_vocabularies(model, self.teacher_tokenizer)
        layout = choose_layout(model, self.args, padded=False)
        shared = layout.kind == self.layout.kind == "tree" and layout.rope_switch is None
        running = functools.partial(frozen, model, self.accelerator.autocast)
        self.teacher = ModelTeacher(running, layout, shared and self.shares_tokens, self.pad_token_id)

    @property
    def shares_tokens(self) -> bool:
        """Whether the teacher reads the student's ids."""
        return True

    def check_vocabularies(self, teacher: nn.Module, tokenizer: Any) -> None:
        """Refuse a teacher whose ids mean other tokens; cut both models' logits to the ids that have one."""
        widths = (logit_width(self.model), logit_width(teacher))
        if self.args.tokenizer_check == "off":
            self.columns = min(widths)
            return
        pairs = ((self.processing_class, self.model), (tokenizer, teacher))
        stops: Any = tuple(terminal_token_ids(t, getattr(causal_lm(m), "generation_config", None)) for t, m in pairs)
        match = compare_tokenizers(self.processing_class, tokenizer, widths=widths, stops=stops)
        options = {"mode": self.args.tokenizer_check, "trainer": type(self).__name__}
        require_same_tokens(match, on_policy=self.args.lmbda > 0, **options)
        self.columns = match.columns if match.verdict != "identical" else None

    # Data --------------------------------------------------------------------------------------------------------

    def make_prompt_source(self) -> PromptSource:
        """Columns beside the prompt are answers and what the teacher is shown: they stay."""
        source = super().make_prompt_source()
        source.drops_columns = False
        return source

    def prepare_datasets(self, train: Any, evaluation: Any) -> tuple[Any, Any]:
        """Prompts as every online trainer's; answers of the dataset as ids, where they are trained or evaluated."""
        train = self._prepared(train, "train_dataset", answers=self.args.lmbda < 1 and not self.args.seq_kd)
        wanted = self.args.eval_mode != "student"
        many = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
        found = {
            name: None if one is None else self._prepared(one, name, answers=wanted and self._has_answers(one))
            for name, one in many.items()
        }
        return super().prepare_datasets(train, found if isinstance(evaluation, dict) else found["eval_dataset"])

    def prepare_evaluation(self, dataset: Any) -> Any:
        """Raw sets as in `prepare_datasets`; prepared ones come back equal."""
        if isinstance(dataset, dict):
            return {name: self.prepare_evaluation(one) for name, one in dataset.items()}
        if "prompt_ids" in (getattr(dataset, "column_names", None) or ()):
            return dataset
        wanted = self.args.eval_mode != "student"
        return self._prepared(dataset, "eval_dataset", answers=wanted and self._has_answers(dataset))

    @staticmethod
    def _has_answers(dataset: Any) -> bool:
        names = getattr(dataset, "column_names", None) or ()
        return "completion" in names or "messages" in names

    def _prepared(self, dataset: Any, name: str, *, answers: bool) -> Any:
        dataset = with_prompt_column(dataset)
        if not answers:
            return dataset
        if "completion" not in (getattr(dataset, "column_names", None) or ()):
            raise DataError(
                f"{name} has no completion column, and lmbda={self.args.lmbda} trains on the dataset's "
                "completions. Fix: a completion "
                "column, seq_kd=True (the teacher samples them), or lmbda=1 (the student does)."
            )
        limits = {"max_length": self.args.max_length, "max_prompt_length": self.args.max_prompt_length}
        return tokenized_answers(dataset, self.processing_class, name=name, **limits)

    def rows(self, examples: list[dict[str, Any]]) -> list[Row]:
        """Rows of the dataset's own answers; without them completions come later."""
        if not examples or "completion_ids" not in examples[0]:
            raise NotImplementedError
        answers = [list(example["completion_ids"]) for example in examples]
        return [Row(list(e["prompt_ids"]), [ids], [[1] * len(ids)]) for e, ids in zip(examples, answers, strict=True)]

    def tokenize(self, examples: list[dict[str, Any]]) -> list[list[int]]:
        """Prompts to sample from, cut as those of dataset rows are."""
        args = self.args
        room = None if args.max_length is None else max(args.max_length - args.max_completion_length, 1)
        limits = [most for most in (args.max_prompt_length, room) if most is not None]
        return [cut_prompt(ids, min(limits, default=None)) for ids in super().tokenize(examples)]

    @property
    def can_dry_run(self) -> bool:
        """Reward functions alone are tried on rows."""
        return self.takes_rewards and self.rewards.functions[0] is not _unrewarded

    # Whose tokens ------------------------------------------------------------------------------------------------

    def samples(self, examples: Sequence[dict[str, Any]], mode: str) -> list[bool]:
        """Which examples the student completes; the same draw on every rank, one for each prompt."""
        if mode == "eval":
            return ["completion_ids" not in example for example in examples]
        size = self.group_size(mode)
        seed = self.args.seed * 1_000_003 + self._generation_number(mode)
        drawn = torch.rand(-(-len(examples) // size), generator=torch.Generator().manual_seed(seed)) < self.args.lmbda
        return drawn.repeat_interleave(size)[: len(examples)].tolist()

    def generated(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """As the parent's; answers of the dataset need no engine, and a rank without examples then does nothing."""
        answered = mode == "eval" and "completion_ids" in self.spare_examples()[0]
        if not examples and answered:
            return RolloutBatch([], [], [], born=self.state.global_step)
        return super().generated(examples, mode)

    def roll_out(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """Completions by whoever the draw names: the student, or the teacher or the dataset."""
        self._sampled = sampled = self.samples(examples, mode)
        if all(sampled):
            return self.student_rollouts(examples, mode)
        own = [example for example, mine in zip(examples, sampled, strict=True) if mine]
        others = [example for example, mine in zip(examples, sampled, strict=True) if not mine]
        mine = iter(self.student_rollouts(own, mode)[0] if own else ())
        given = iter(
            self._teacher_rollouts(others, mode) if self.args.seq_kd and mode == "train" else self._answers(others)
        )
        rollouts = [next(mine) if one else next(given) for one in sampled]
        chat = not isinstance(examples[0]["prompt"], str)
        return rollouts, completions_for_rewards(self.processing_class, rollouts, conversational=chat)

    def student_rollouts(self, examples: list[dict[str, Any]], mode: str) -> tuple[list[Rollout], list[Any]]:
        """Samples of the student."""
        return super().roll_out(examples, mode)

    def _answers(self, examples: list[dict[str, Any]]) -> list[Rollout]:
        return [as_rollout(example, self.processing_class) for example in examples]

    @functools.cached_property
    def _teacher_engine(self) -> Any:
        if self.teacher_model is None:
            raise ConfigError("seq_kd=True needs a teacher model of its own to sample from. Fix: teacher_model.")
        return self.engine_on(self.teacher_model)

    def _teacher_rollouts(self, examples: list[dict[str, Any]], mode: str) -> list[Rollout]:
        requests = [Request(prompt) for prompt in self.tokenize(examples)]
        rollouts = self._teacher_engine.generate(requests, self.sampling(mode))
        texts = self.processing_class.batch_decode([r.token_ids for r in rollouts], skip_special_tokens=True)
        for rollout, text in zip(rollouts, texts, strict=True):
            rollout.text, rollout.logp = text, []
        return rollouts

    # One generation ----------------------------------------------------------------------------------------------

    def generate_and_score(self, examples: list[dict[str, Any]], mode: str) -> RolloutBatch:
        """Completions, rewards where the method has them, and what the teacher needs to know of each."""
        generation = self.generated(examples, mode)
        rewarded = self.can_dry_run
        table = self.score(generation, mode) if rewarded else self._no_rewards(len(generation.rollouts))
        self.weight_sync.rest()
        self.attach_logps(generation, mode)
        if rewarded:
            mine = self.advantages(generation, table, mode)[table.start :][: len(generation.rollouts)]
            generation.columns["advantages"] = mine.tolist()
        if len(self._own) == len(generation.rollouts):
            generation.columns["on_policy"] = [float(one) for one in self._own]
        self.keep(generation, table, mode)
        self.record.add_completions(self.completion_rows(generation, table), evaluation=mode == "eval")
        return generation

    @property
    def _own(self) -> list[bool]:
        return getattr(self, "_sampled", [])

    @staticmethod
    def _no_rewards(count: int) -> RewardTable:
        return RewardTable(torch.empty(count, 0), [], torch.empty(0))

    @property
    def keeps_completions(self) -> bool:
        """Whether the teacher needs more of a completion than its tokens."""
        return self.privileged or self.server is not None or self.score_file is not None

    def keep(self, generation: RolloutBatch, table: RewardTable, mode: str) -> None:
        """Number the completions, and remember what the teacher needs to know of each."""
        if not self.keeps_completions:
            return
        facts = self.facts(generation, table, mode)
        sign = 1 if mode == "train" else -1
        self.kept[mode] = {sign * (i + 1): fact for i, fact in enumerate(facts)}
        generation.columns["key"] = [float(key) for key in self.kept[mode]]

    def facts(self, generation: RolloutBatch, table: RewardTable, mode: str) -> list[Any]:
        """What the teacher needs to know of each completion, as JSON."""
        rollouts = generation.rollouts
        if self.score_file is not None:
            if mode == "eval":
                raise ConfigError("teacher_scores has no scores of evaluation sets. Fix: eval_strategy='no'.")
            return [int(example["score_row"]) for example in generation.examples]
        assert self.server is not None
        return self.server.score([r.prompt_ids for r in rollouts], [r.token_ids for r in rollouts])

    def _fact(self, key: int) -> Any:
        return self.kept["train" if key > 0 else "eval"][key]

    def teacher_prompt(self, prompt: Any, extra: str, template: str, most: int | None) -> list[int]:
        """Ids of ``template`` of the prompt and what only the teacher sees, with room for a completion."""
        room = None if self.context is None else self.context - self.args.max_completion_length
        most = min((limit for limit in (most, room) if limit is not None), default=None)
        kwargs = self.args.chat_template_kwargs or {}
        return privileged_prompt(prompt, extra, template, self.processing_class, most=most, kwargs=kwargs)

    # Rewards, where a GRPO term reads them -----------------------------------------------------------------------

    def advantages(self, generation: RolloutBatch, table: RewardTable, mode: str) -> Tensor:
        """As GRPO's."""
        args, size = self.args, self.group_size(mode)
        stats = group_advantages(table.values, table.weights, size, scale_rewards=str(args.scale_rewards))
        scored = stats.totals[~stats.totals.isnan()]
        whole = float(scored.std()) if scored.numel() > 1 else 0.0
        std = {"reward_std": whole, "frac_reward_zero_std": stats.zero_std_share}
        self.reward_watch.log(generation, table, stats.totals, stats.advantages, mode, **std)
        self.rewarded = stats.totals
        return stats.advantages

    def policy_terms(self, outputs: ModelOutputs, batch: Batch, extra: Tensor | None = None) -> LossTerms:
        """GRPO's loss; ``extra (B, T)`` is added to the advantage of each token."""
        logp = outputs.logp
        assert logp is not None
        shared = torch.zeros_like(logp) if batch.advantages is None else spread(batch.advantages, batch.sequence)
        total = shared if extra is None else shared + extra
        return grpo_objective(outputs, replace(batch, advantages=total), self.args)

    def needs_old_logp(self, mode: str) -> bool:
        """Ratios are clipped in the policy's loss, and where ``is_clip`` is set; exact divergences have none."""
        return (self.takes_rewards or self.axes.is_clip is not None) and super().needs_old_logp(mode)

    def make_reference(self) -> Reference | None:
        """``beta`` is the divergence's, and no KL penalty, but where there is a GRPO term."""
        return super().make_reference() if self.takes_rewards else None

    # The loss ----------------------------------------------------------------------------------------------------

    def teacher_view(self, batch: Batch) -> Any:
        """The teacher at the loss positions of a batch."""
        if (file := self.score_file) is not None:
            return sparse_view(batch, lambda key: file.read(self._fact(key)))
        if self.server is not None:
            return sparse_view(batch, self._fact)
        assert self.teacher is not None
        if self.privileged and "key" in batch.columns:
            return self.teacher.of_prompts(batch, self.kept["train"] | self.kept["eval"])
        return self.teacher.of_batch(batch)

    def comparison(self, batch: Batch) -> Any:
        """What the student's head compares itself with; None where there is no teacher."""
        if self.axes.support == "none":
            return None
        own = self.args.temperature if self.takes_rewards else self.axes.student_temperature
        options: dict[str, Any] = {"columns": self.columns, "policy_temperature": own}
        return Comparison(self.axes, self.teacher_view(batch), **options)

    def compute_loss_terms(self, model: nn.Module, batch: Batch) -> tuple[LossTerms, ModelOutputs]:
        """The teacher first, then the student, whose head compares the two."""
        if model.training and self.denominators.tokens == 0:
            raise DataError(
                "an optimiser step has no answer token: there is nothing to learn. Fix: longer completions."
            )
        needs = {"logp", "entropy"} | ({"aux"} if self.router_coefficient else set())
        options: dict[str, Any] = {
            "temperature": self.axes.student_temperature,
            "chunk_size": self.args.logits_chunk_size,
        }
        compare = self.comparison(batch)
        outputs = forward(model, batch, frozenset(needs), compare=compare, **options)
        terms = self.objective(outputs, batch)
        if self.router_coefficient and outputs.aux_loss is not None:
            term = self.router_coefficient * outputs.aux_loss[None]
            terms.extra.append(LossTerms(term, torch.ones_like(term, dtype=torch.bool), "local_token"))
            terms.metrics["aux_loss"] = mean(outputs.aux_loss)
        return terms, outputs

    def objective(self, outputs: ModelOutputs, batch: Batch) -> LossTerms:
        """See `distillation_objective`."""
        return distillation_objective(outputs, batch, self.axes)

    def named_counts(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Sequences that have a teacher, and aligned groups, where the loss divides by them."""
        if self.axes.reduction == "active":
            return {"active": sum(float(b.columns["active"].sum()) for b in batches if "active" in b.columns)}
        if self.axes.support == "aligned":
            return {"groups": sum(float((b.columns["aligned"] > 0).sum()) for b in batches if "aligned" in b.columns)}
        return {}

    # Checkpoints -------------------------------------------------------------------------------------------------

    def state_to_save(self) -> dict[str, Any]:
        """As the parent's, with what the teacher must know of completions that wait."""
        facts = {key: _plain(fact) for key, fact in self.kept["train"].items()}
        return super().state_to_save() | {"kept": facts}

    def load_saved_state(self, state: dict[str, Any]) -> None:
        """Undo `state_to_save`."""
        super().load_saved_state(state)
        self.kept["train"] = {int(key): _restored(fact) for key, fact in state.get("kept", {}).items()}


def _plain(fact: Any) -> Any:
    return (
        {name: getattr(fact, name).tolist() for name in TokenScores.__annotations__}
        if isinstance(fact, TokenScores)
        else fact
    )


def _restored(fact: Any) -> Any:
    return (
        TokenScores(**{name: torch.tensor(value) for name, value in fact.items()}) if isinstance(fact, dict) else fact
    )
