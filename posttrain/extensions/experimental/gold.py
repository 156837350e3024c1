"""GOLD: GKD that also supports teachers with another tokenizer. Tokens of student and teacher are aligned by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count, takewhile
from typing import Any, ClassVar, Literal

import torch

from posttrain.checks.tokenizers import compare_tokenizers, token_bytes
from posttrain.data.chat import common_prefix, terminal_token_ids, tokenize_prompts
from posttrain.data.forest import sequences
from posttrain.errors import ConfigError
from posttrain.extensions.experimental.distillation_methods import OF_BUFFER
from posttrain.fields import NonNegativeFloat, PositiveFloat, config, option
from posttrain.loop.media import media_of
from posttrain.methods.distillation.config import Axes, logit_width, preset
from posttrain.methods.distillation.gkd import GKDConfig
from posttrain.methods.distillation.objective import AlignedComparison, Distillation
from posttrain.methods.distillation.teacher import own_tokenizer, teacher_id
from posttrain.metrics import mean
from posttrain.models import load
from posttrain.rollouts.base import RolloutEngine
from posttrain.rollouts.batch import RolloutBatch
from posttrain.trainers.arguments import (
    Adapter,
    Callbacks,
    EvalSets,
    Metrics,
    Model,
    OptimizerClass,
    Optimizers,
    Quantization,
    Rewards,
    Tokenizer,
    TrainSet,
)
from posttrain.trainers.distillation import DistillationTrainer
from posttrain.types import Advantages, Batch, Rollout, Row

PROBE = "The quick brown fox."
# A text is encoded after one of these prefixes. Tokens that a tokenizer adds at the beginning can then be removed.
ANCHORS = ("\n", "x", ".", "0")


def byte_groups(first: Sequence[bytes], second: Sequence[bytes]) -> list[tuple[range, range]]:
    """Align two token sequences. Both sequences are split at each byte position where both have a token boundary. Tokens
    after the last common boundary are excluded.

    >>> byte_groups([b"ab", b"cde", b"f"], [b"a", b"b", b"cdef"])
    [(range(0, 1), range(0, 2)), (range(1, 3), range(2, 3))]
    """
    # Each dict maps the number of bytes before a token boundary to the number of tokens before this boundary.
    mine, theirs = (dict(zip(accumulate(map(len, side)), count(1), strict=False)) for side in (first, second))
    groups, i, j = [], 0, 0
    for end in sorted(mine.keys() & theirs.keys()):
        if b"".join(first[i : mine[end]]) != b"".join(second[j : theirs[end]]):
            break
        groups.append((range(i, mine[end]), range(j, theirs[end])))
        i, j = mine[end], theirs[end]
    return groups


@config
@preset(
    unread=OF_BUFFER | {
        "wandb_log_unique_prompts": (True, "Use log_unique_prompts."),
        "callbacks": (None, "Pass callbacks to the trainer."),
        "uld_skip_student_eos": (True, "Remove it: a stop token has no text to align."),
        "uld_skip_teacher_eos": (True, "Remove it: a stop token has no text to align."),
    },
    learning_rate=1e-7, top_p=0.95, vllm_server_port=8001,
    temperature=(0.9, "Divisor of the logits in sampling, and in the loss without use_uld_loss, above 0."),
)  # fmt: skip
class GOLDConfig(GKDConfig):
    """Arguments of `GOLDTrainer`. Student and teacher may have different tokenizers."""

    _loss_temperature: ClassVar[str | float] = "temperature"
    teacher_tokenizer_name_or_path: str | None = option(
        None,
        "Folder or Hub id of the teacher's tokenizer. None: the tokenizer is loaded from the teacher's folder or Hub id. Set "
        "it if the teacher is passed as a model object.",
    )
    use_uld_loss: bool = option(
        False,
        "Use a loss for two different tokenizers, which aligns tokens by their bytes. Set it if student and teacher have "
        "different tokenizers. It needs a teacher model in this process.",
    )
    use_extended_uld: bool = option(
        True,
        "With use_uld_loss: align groups of tokens with equal bytes. False compares the i-th token of the student with the "
        "i-th token of the teacher, even if their texts differ.",
    )
    uld_token_merge_strategy: Literal["observed", "bayesian"] = option(
        "observed",
        "With use_uld_loss: which distribution represents a group of aligned tokens. 'observed': the distribution that "
        "predicts the group's first token. 'bayesian': the distribution that predicts the group's last token.",
    )
    uld_use_hybrid_loss: bool = option(
        False, "With use_uld_loss: use the divergence selected by beta for tokens whose bytes are in both vocabularies."
    )
    uld_hybrid_matched_weight: NonNegativeFloat | None = option(
        None,
        "With uld_use_hybrid_loss: weight of token ids whose bytes are in both vocabularies. Set both hybrid weights or "
        "neither. None: the fraction of the teacher's vocabulary that these ids cover.",
    )
    uld_hybrid_unmatched_weight: NonNegativeFloat | None = option(
        None,
        "With uld_use_hybrid_loss: weight of token ids whose bytes are in only one vocabulary. None: 1 minus "
        "uld_hybrid_matched_weight.",
    )
    uld_crossentropy_weight: NonNegativeFloat = option(
        0.0, "With use_uld_loss: weight of the negative log-likelihood of the answer's tokens. 0 disables this term."
    )
    uld_distillation_weight: NonNegativeFloat = option(
        1.0, "With use_uld_loss: weight of the loss between student and teacher."
    )
    uld_student_temperature: PositiveFloat = option(
        1.0, "With use_uld_loss: the student's temperature in the loss, above 0."
    )
    uld_teacher_temperature: PositiveFloat = option(
        1.0, "With use_uld_loss: the teacher's temperature in the loss, above 0."
    )

    def _rules(self) -> list[tuple[str, bool, str]]:
        matched, unmatched = self.uld_hybrid_matched_weight, self.uld_hybrid_unmatched_weight
        far = self.seq_kd or self.teacher_scores or self.teacher_model_server_url or self.loss_top_k
        text = (
            "with seq_kd, teacher_scores, teacher_model_server_url or loss_top_k: their samples and scores belong to "
            "another "
        )
        return [
            *super()._rules(),
            (
                "uld_hybrid_matched_weight",
                (matched is None) == (unmatched is None),
                f"and uld_hybrid_unmatched_weight={unmatched}: set both or neither",
            ),
            ("use_uld_loss", not (self.use_uld_loss and far), text + "tokenizer. Fix: a teacher model in this process"),
        ]

    def axes(self) -> Axes:
        """Return the settings of the loss. With ``use_uld_loss``, the loss compares aligned groups of tokens."""
        if not self.use_uld_loss:
            return super().axes()
        return Axes(
            "aligned",
            beta=self.beta,
            student_temperature=self.uld_student_temperature,
            teacher_temperature=self.uld_teacher_temperature,
            weight=self.uld_distillation_weight,
            cross_entropy=self.uld_crossentropy_weight,
        )


class GOLD(Distillation):
    """General online logit distillation: GKD that also supports teachers with another tokenizer than the student.

    Reference: Universal Logit Distillation, arXiv:2402.12030.
    """

    config_class = GOLDConfig


class GOLDTrainer(DistillationTrainer):
    """General online logit distillation: GKD that also supports teachers with another tokenizer than the student.

    Args:
        model: Student to train, as a path, Hub id, model object or peft model.
        teacher_model: Teacher as a path, Hub id or model object, or a mapping from names to teachers. With several
            teachers, the column ``teacher_id`` selects the teacher of each row, or ``args.teacher_weights`` mixes them.
            If None, ``args`` sets the teacher.
        args: Training arguments. If None, the defaults are used, with an ``output_dir`` named after the model.
        data_collator: Not supported, must be None. Batches are built after completions are sampled.
        train_dataset: Dataset with ``prompt`` (and ``completion``), or with ``messages``.
        eval_dataset: Evaluation dataset, or a mapping from names to evaluation datasets.
        processing_class: Tokenizer or processor of the student. If None, the tokenizer is loaded from the student's path or Hub
            id.
        compute_metrics: Function that computes metrics from an `EvalPrediction` during evaluation.
        callbacks: Additional `transformers.TrainerCallback` objects.
        optimizers: Tuple of optimizer and learning-rate scheduler. An entry that is None is created from ``args``.
        preprocess_logits_for_metrics: Function that reduces the logits of a batch before ``compute_metrics`` receives
            them.
        peft_config: Config of a new adapter to train. If None, no adapter is added.
        teacher_processing_class: Tokenizer or processor of the teacher. If None, the tokenizer is loaded from the teacher's
            path or Hub id. For a teacher that was built in memory, the tokenizer is assumed to equal the student's.
        teacher_server: Client of a server that scores completions, see `ServerTeacher`; or a mapping from names to
            clients.
        reward_funcs: Not supported, must be None. Only MiniLLM and SDPO use rewards.
        reward_processing_classes: Not used. Only MiniLLM and SDPO use rewards.
        formatting_func: Not supported, must be None. Map the dataset to ``prompt`` and ``completion`` instead.
        quantization_config: Quantization for loading ``model`` from a path or Hub id.
        tools: Not supported, must be None. Use `GRPOTrainer`.
        rollout_engine: Engine object that samples completions. If None, ``args.rollout_engine`` selects the engine.
        model_init: Function that returns a new model for each trial of a hyperparameter search.
        compute_loss_func: Not supported, must be None. To change the loss, override ``objective`` in a subclass.
        optimizer_cls_and_kwargs: Optimizer class and its keyword arguments. Overrides ``args.optim``.
        rollout_func: Not supported, must be None. Use `GRPOTrainer`.
        environment_factory: Not supported, must be None. Use `GRPOTrainer`.

    Reference: Universal Logit Distillation, arXiv:2402.12030.
    """

    METHOD = GOLD
    args: GOLDConfig

    def __init__(
        self,
        model: Model,
        teacher_model: Model | None = None,
        args: GOLDConfig | None = None,
        data_collator: Callable | None = None,
        train_dataset: TrainSet | None = None,
        eval_dataset: EvalSets | None = None,
        processing_class: Tokenizer | None = None,
        compute_metrics: Metrics | None = None,
        callbacks: Callbacks | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable | None = None,
        peft_config: Adapter | None = None,
        *,
        teacher_processing_class: Tokenizer | None = None,
        teacher_server: Any = None,
        reward_funcs: Rewards | None = None,
        reward_processing_classes: Tokenizer | list[Tokenizer] | None = None,
        formatting_func: Callable[[dict], str] | None = None,
        quantization_config: Quantization | None = None,
        tools: Sequence[Callable] | None = None,
        rollout_engine: RolloutEngine | None = None,
        model_init: Callable | None = None,
        compute_loss_func: Callable | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
    ) -> None:
        super().__init__(
            model,
            teacher_model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            peft_config=peft_config,
            teacher_processing_class=teacher_processing_class,
            teacher_server=teacher_server,
            reward_funcs=reward_funcs,
            reward_processing_classes=reward_processing_classes,
            formatting_func=formatting_func,
            quantization_config=quantization_config,
            tools=tools,
            rollout_engine=rollout_engine,
            model_init=model_init,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )

    def _other_teacher(self, teacher: object, tokenizer: Tokenizer, name: str = "") -> None:
        args = self.args
        of = args.teacher_tokenizer_name_or_path
        name_or_path = of or teacher_id(teacher, args)
        if args.use_uld_loss and self.vision.images:
            self.teacher_vision = media_of(args, tokenizer, name_or_path, (self.train_dataset,), takes=True)
            tokenizer = self.teacher_vision.processor
        elif tokenizer is None and of is not None:
            tokenizer = load.load_tokenizer(of, trust_remote_code=args.trust_remote_code)
        if args.use_uld_loss and tokenizer is None:
            if not name_or_path:
                raise ConfigError(
                    "use_uld_loss=True needs the teacher's tokenizer, which is unknown for a model object. Fix: pass "
                    "teacher_processing_class or teacher_tokenizer_name_or_path."
                )
            tokenizer = own_tokenizer(name_or_path, required=True, trust_remote_code=args.trust_remote_code)
        super()._other_teacher(teacher, tokenizer, name)

    @property
    def shares_tokens(self) -> bool:
        """Whether teacher and student use the same token ids. False with ``use_uld_loss``, which aligns the tokens by bytes."""
        return not self.args.use_uld_loss

    @property
    def keeps_completions(self) -> bool:
        """Whether additional data is stored for each completion. With ``use_uld_loss``, this data is the token ids of the
        prompt and the completion in the teacher's tokenizer.
        """
        return self.args.use_uld_loss or super().keeps_completions

    def check_vocabularies(self, teacher: Any, tokenizer: Tokenizer) -> None:
        """Check the tokenizers of student and teacher. With ``use_uld_loss``, both tokenizers must represent every byte.
        Otherwise, the vocabularies must match.
        """
        if not self.args.use_uld_loss:
            return super().check_vocabularies(teacher, tokenizer)
        match = compare_tokenizers(self.processing_class, tokenizer)
        lossy = [kind for kind in match.bytes if kind not in ("bytes", "byte-fallback")]
        if lossy:
            raise ConfigError(
                f"use_uld_loss=True needs tokenizers that represent every byte, but these are {match.bytes[0]} "
                f"(student) and {match.bytes[1]} (teacher). Fix: use a teacher with a byte-level or byte-fallback "
                "tokenizer."
            )
        self._mine, self._theirs = token_bytes(self.processing_class), token_bytes(tokenizer)
        spelled = b"".join(self._theirs[i] for i in continued(tokenizer, self._theirs, PROBE))
        if spelled != PROBE.encode():
            raise ConfigError(
                f"use_uld_loss=True, but the teacher's tokenizer converts {PROBE!r} to "
                f"{spelled.decode(errors='replace')!r}, so hardly any token could be aligned. Fix: use a teacher "
                "whose tokenizer does not change the text."
            )
        sizes = (len(self.processing_class), len(tokenizer))
        self._widths = (min(sizes[0], logit_width(self.model)), min(sizes[1], logit_width(teacher)))
        theirs = {spelled: i for i, spelled in self._theirs.items() if i < self._widths[1]}
        pairs = sorted((i, theirs[s]) for i, s in self._mine.items() if s in theirs and i < self._widths[0])
        if not pairs and self.args.uld_use_hybrid_loss:
            raise ConfigError(
                "uld_use_hybrid_loss=True, but the tokenizers have no token in common. Fix: set it to False."
            )
        self._pairs = torch.tensor(pairs, device=self.args.device).reshape(-1, 2).T
        share = len(pairs) / self._widths[1]
        self.run.log({"align/vocab_overlap": mean(share)})
        matched, unmatched = self.args.uld_hybrid_matched_weight, self.args.uld_hybrid_unmatched_weight
        self._weights = (share, 1 - share) if matched is None else (matched, unmatched)
        return None

    def facts(self, rollouts: RolloutBatch, found: Advantages) -> tuple[list[Any], Advantages]:
        """Return the teacher's token ids of each prompt and completion, and add the token column ``aligned`` to the
        advantages.

        ``aligned`` marks one student token of each group of aligned tokens. The value at this token is the position,
        counted from 1, of the teacher token with which the student token is compared. The value is 0 at all other tokens.
        """
        if not self.args.use_uld_loss:
            return super().facts(rollouts, found)
        facts, columns = [], []
        stops = set(terminal_token_ids(self.processing_class)) | set(self.stop_ids)
        groups_made = 0
        for example, rollout in zip(rollouts.examples, rollouts.rollouts, strict=True):
            # Compare only the text before the stop token. Later text depends on the chat template, and the teacher's chat
            # template may differ.
            written = takewhile(lambda token: token not in stops, rollout.token_ids)
            spelled = [self._mine.get(token, b"") for token in written]
            text = b"".join(spelled)
            valid = _longest_text(text)
            ids = continued(self.teacher_tokenizer, self._theirs, valid)
            groups = self._groups([s for s in spelled if s], [self._theirs[i] for i in ids])
            places = [k for k, s in enumerate(spelled) if s]
            column = [0.0] * len(rollout.token_ids)
            at = 0 if self.args.uld_token_merge_strategy == "observed" else -1
            for mine, theirs in groups:
                column[places[mine[at]]] = float(theirs[at] + 1)
            single = sum(len(a) == len(b) == 1 for a, b in groups)
            used = sum(len(spelled[places[i]]) for a, _ in groups for i in a)
            groups_made += len(groups)
            facts.append({"prompt": self._prompt(example, rollout), "ids": ids})
            columns.append(column)
            shares = {
                "align/dropped_bytes_fraction": mean(1 - used / max(len(text), 1), weight=len(text)),
                "align/one_to_one_fraction": mean(single / max(len(places), 1), weight=len(places)),
            }
            self.run.log(shares, rollouts.mode)
        self.run.log({"align/group_count": mean(float(groups_made))}, rollouts.mode)
        return facts, replace(found, token_columns={**found.token_columns, "aligned": columns})

    def _prompt(self, example: dict[str, Any], rollout: Rollout) -> list[int]:
        """Return the teacher's token ids of a prompt. Messages are rendered with the teacher's chat template. If the prompt
        is plain text, the text of the student's prompt tokens is tokenized again.
        """
        if self.vision.images:
            return list(self.teacher_vision.prompt(example, [image.picture for image in rollout.pictures]))
        if isinstance(example["prompt"], str):
            special = set(self.processing_class.all_special_ids)
            text = _longest_text(b"".join(self._mine.get(i, b"") for i in rollout.prompt_ids if i not in special))
            # Remove a space that the student's tokenizer added at the beginning of the text. The teacher's tokenizer adds a
            # space itself if needed.
            example = {"prompt": text if example["prompt"].endswith(text) else text.removeprefix(" ")}
        kwargs = self.args.chat_template_kwargs or {}
        return tokenize_prompts([example], self.teacher_tokenizer, chat_template_kwargs=kwargs)[0]

    def _groups(self, mine: list[bytes], theirs: list[bytes]) -> list[tuple[range, range]]:
        if self.args.use_extended_uld:
            return byte_groups(mine, theirs)
        return [(range(i, i + 1), range(i, i + 1)) for i in range(min(len(mine), len(theirs)))]

    def comparison(self, batch: Batch) -> Any:
        """Return the function that compares the student's and the teacher's distributions at aligned positions. The
        student's output layer calls this function.
        """
        if not self.args.use_uld_loss:
            return super().comparison(batch)
        rows, index, offset = [], [], 0
        for row in sequences(batch):
            aligned, keys = row.token_columns["aligned"], row.sequence_columns["key"]
            for mask, places, key in zip(row.loss_masks, aligned, keys, strict=True):
                fact = self._fact(int(key))
                placed = []
                if row.pictures:
                    pictures = [image.picture for image in row.pictures[0]]
                    placed = self.teacher_vision.reader.place_all([fact["prompt"], fact["ids"]], pictures)
                rows.append(Row(fact["prompt"], [fact["ids"]], [[1] * len(fact["ids"])], pictures=placed))
                index += [offset + int(place) - 1 for place, valid in zip(places, mask, strict=True) if place and valid]
                offset += len(fact["ids"])
        device = batch.input_ids.device
        teacher = self.teacher.of_rows(rows, device)
        mine = (batch.columns["aligned"][batch.loss_mask] > 0).nonzero().flatten()
        chosen = replace(teacher, hidden=teacher.hidden[torch.tensor(index, dtype=torch.long, device=device)])
        matched = (self._pairs[0], self._pairs[1]) if self.args.uld_use_hybrid_loss else None
        options: dict[str, Any] = {"weights": self._weights, "widths": self._widths}
        if self.vision.images:
            pairs = zip((self.vision, self.teacher_vision), self._widths, strict=True)
            options["without"] = tuple(self.never_written(vision, width) for vision, width in pairs)
        return AlignedComparison(self.axes, chosen, mine, matched, **options)


def continued(tokenizer: Tokenizer, spelled: Mapping[int, bytes], text: str) -> list[int]:
    """Encode a text as the continuation of another text, without the space that SentencePiece adds before a first word."""
    value = text.encode()

    def spells(ids: list[int]) -> int:
        """Return the number of bytes at the beginning of the text that ``ids`` represent."""
        return common_prefix(b"".join(spelled[i] for i in ids), value)

    best = tokenizer(text, add_special_tokens=False)["input_ids"]
    for before in ANCHORS:
        if spells(best) == len(value):
            break
        first, whole = (tokenizer(string, add_special_tokens=False)["input_ids"] for string in (before, before + text))
        if whole[: len(first)] == first:
            best = max(best, whole[len(first) :], key=spells)
    return best


def _longest_text(value: bytes) -> str:
    """Return the longest prefix of the bytes that is valid UTF-8. An incomplete character at the end is removed, because it
    cannot be encoded.
    """
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return value[: error.start].decode()
