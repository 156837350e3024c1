"""Where a teacher's side of the comparison comes from: a model, the student itself, a file of scores, a server."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch
import tqdm
import transformers
from torch import Tensor, nn

from posttrain.checks.tokenizers import compare_tokenizers, require_same_tokens
from posttrain.data.forest import Layout, collate, sequences, share_prompts
from posttrain.data.formats import first_row, plain_rows
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.methods.distillation.config import Axes, logit_width
from posttrain.methods.distillation.data import tokenized_answers, with_prompt_column, with_template_arguments
from posttrain.methods.distillation.objective import HiddenTeacher, TeacherShare, TokenScores, capture
from posttrain.models import load
from posttrain.models.architecture import get_config_model_id
from posttrain.models.forward import forward, on_whole_rows
from posttrain.models.heads import causal_lm, evaluating, install_token_head
from posttrain.models.probe import probe_layout
from posttrain.models.reference import Reference, hash_vocabulary
from posttrain.report.files import whole_file
from posttrain.rollouts.engines import IN_WORKERS
from posttrain.types import Batch, Rollout, Row

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


def by_name(teachers: Any) -> dict[str, Any]:
    """Teachers by their names; of a single one the name is empty."""
    return dict(teachers) if isinstance(teachers, Mapping) else {"": teachers}


def load_teacher(teacher: object, args: PostTrainingConfig, student: nn.Module) -> nn.Module:
    """The teacher as a frozen model in eval mode.

    Args:
        teacher: A model or an id; None: ``teacher_model_name_or_path``.
        args: Of the trainer.
        student: Which it must not be.

    Raises:
        ConfigError: No teacher, or the student itself.
    """
    teacher = teacher if teacher is not None else args.teacher_model_name_or_path
    if teacher is None:
        raise ConfigError(
            "there is no teacher. Fix: teacher_model (a model or an id), teacher_scores (a file), teacher_model_server_url, or "
            "teacher_model_kind='base', 'live' or 'ema' for the student itself."
        )
    if isinstance(teacher, nn.Module):
        if causal_lm(teacher) is causal_lm(student):
            raise ConfigError(
                "teacher_model is the student object itself: its divergence is 0 at every step. Fix: another model, or "
                "teacher_model_kind='base', which compares with the weights as they are now."
            )
        return teacher.requires_grad_(False).eval()
    kwargs: dict[str, Any] = {"dtype": "auto", "trust_remote_code": args.trust_remote_code}
    kwargs |= {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    kwargs |= load.with_dtype(args.teacher_model_init_kwargs or {})
    return load.create_model_from_path(teacher, **kwargs).requires_grad_(False).eval()


def teacher_id(teacher: object, args: PostTrainingConfig) -> str:
    """Id or folder of a teacher: as it was given, or where a model object was loaded from; empty for one built in memory."""
    if isinstance(teacher, nn.Module):
        return get_config_model_id(causal_lm(teacher).config)
    return teacher or args.teacher_model_name_or_path or ""


def own_tokenizer(name: str, *, required: bool, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The tokenizer of a teacher's folder or id.

    Args:
        name: See `teacher_id`; of a server, its model.
        required: Whether a tokenizer that cannot be loaded is an error. If not, the result is None, and a warning says so.
        trust_remote_code: As for the teacher.
        revision: Of the teacher.

    Raises:
        ModelError: It is required, and cannot be loaded.
    """
    try:
        return load.load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    except ModelError as error:
        if required:
            raise
        text = "the teacher's tokenizer is not known, so that its ids are taken for the student's: %s Fix: "
        logger.warning(text + "teacher_processing_class.", error)
        return None


@contextmanager
def frozen(model: nn.Module, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Iterator[nn.Module]:
    """A model of its own, without gradients, in the precision of the student: else rounding would be a divergence."""
    with torch.no_grad(), autocast():
        yield model


@dataclass
class ModelTeacher:
    """A model in this process; its logits exist only where the student's are compared with them.

    Attributes:
        running: Context in which the model is the teacher (eval mode, no gradients, maybe another adapter).
        layout: How its rows are laid out; a forest where a probe shows that it is exact.
        shared: Whether the student's batches are laid out for it too.
        pad_token_id: For its batches.
    """

    running: Callable[[], AbstractContextManager[nn.Module]]
    layout: Layout
    shared: bool
    pad_token_id: int

    def of_batch(self, batch: Batch, members: Sequence[int] | None = None) -> HiddenTeacher:
        """The teacher at the loss positions of a batch, in their order; None: of all its sequences."""
        if members is not None or not self.shared:
            rows = sequences(batch)
            return self.of_rows(rows if members is None else [rows[k] for k in members], batch.input_ids.device)
        with self.running() as model, on_whole_rows(model):
            return forward(model, batch, frozenset(), compare=capture).compared["teacher"]

    def of_rows(self, rows: Sequence[Row], device: torch.device | str) -> HiddenTeacher:
        """The teacher at the loss tokens of all completions, in the order of the rows; equal prompts are computed once."""
        bare = [Row(row.prompt_ids, row.completions, row.loss_masks, pictures=row.pictures) for row in rows]
        shared, places = share_prompts(bare)
        pieces: list[Tensor] = [torch.empty(0)] * len(places)
        view: Any = None
        with self.running() as model, on_whole_rows(model):
            for batch in collate(shared, pad_token_id=self.pad_token_id, layout=self.layout):
                view = forward(model, batch.to(device), frozenset(), compare=capture).compared["teacher"]
                counts = torch.bincount(batch.sequence[batch.loss_mask], minlength=batch.num_sequences).tolist()
                for origin, piece in zip(batch.origin, view.hidden.split(counts), strict=True):
                    pieces[places[origin]] = piece
        return replace(view, hidden=torch.cat(pieces))

    def of_prompts(self, batch: Batch, prompt_of: Callable[[int], list[int]]) -> HiddenTeacher:
        """The teacher after prompts of its own, by the number in the batch's column ``key``."""
        rows = [Row(prompt_of(key), [ids], [mask]) for key, ids, mask in _keyed(batch)]
        return self.of_rows(rows, batch.input_ids.device)


class AdapterAverage(transformers.TrainerCallback):
    """Moves the teacher's adapter, a copy of the student's as it was given, towards the student's.

    Factors are averaged, A and B each: with a small share that follows the average of their products.

    Args:
        teacher: Holds the copy.
    """

    def __init__(self, teacher: Reference) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Mix the student's share in, where it is due."""
        if state.global_step % args.teacher_sync_steps:
            return
        named = dict(self.teacher.policy.named_parameters())
        mine, theirs = f".{self.teacher.adapter}", f".{self.teacher.policy.active_adapter}"
        for name, parameter in named.items():
            if f"{mine}." in f"{name}.":
                parameter.lerp_(named[name.replace(mine, theirs)], args.teacher_update_rate)


def _keyed(batch: Batch) -> Iterator[tuple[int, list[int], list[int]]]:
    """``(key, completion, loss mask)`` of every sequence, in the order of its loss positions."""
    for row in sequences(batch):
        for key, ids, mask in zip(row.sequence_columns["key"], row.completions, row.loss_masks, strict=True):
            yield int(key), ids, mask


def shares_of_batch(
    batch: Batch, weights: Mapping[str, float] | None, names: Sequence[str], say: Callable[[str, list[int] | None], Any]
) -> dict[str, TeacherShare]:
    """What several teachers say of a batch, each asked about the sequences that are its own and no others.

    Args:
        batch: Its column ``teacher`` has the number of each sequence's teacher, unless there are weights.
        weights: Of the divergence from each, by name: every teacher is asked about every sequence. None: the column's alone.
        names: Of the teachers, in the order of their numbers.
        say: A teacher's side of some sequences of the batch by its name; None: of all.
    """
    if weights is not None:
        return {name: TeacherShare(say(name, None), weight=weights[name]) for name in names if weights[name]}
    numbers, places, shares = batch.columns["teacher"].tolist(), batch.sequence[batch.loss_mask], {}
    for number, name in enumerate(names):
        members = [k for k, one in enumerate(numbers) if one == number]
        rows = torch.isin(places, places.new_tensor(members)).nonzero().flatten()
        whole = len(members) == len(numbers)
        # One that has no sequence here is not asked, and counts in its share of all tokens.
        shares[name] = TeacherShare(say(name, None if whole else members) if members else None, rows)
    return shares


def scores_of_batch(
    batch: Batch, scores: Callable[[int], TokenScores], members: Sequence[int] | None = None
) -> TokenScores:
    """Scores of the batch's loss tokens, in their order, by the number in its column ``key``; None: of all its sequences."""
    score_parts, keyed = [], list(_keyed(batch))
    for key, ids, mask in keyed if members is None else [keyed[k] for k in members]:
        one = scores(key)
        if not ids:  # Of a completion that is left out no token is here.
            mask = [0] * len(one.actual)
        kept = torch.tensor(mask, dtype=torch.bool)
        if len(one.actual) != len(kept):
            raise ModelError(f"the teacher scored {len(one.actual)} of {len(ids)} tokens of a completion.")
        score_parts.append((one.ids[kept], one.logps[kept], one.actual[kept]))
    return TokenScores(*(torch.cat(parts).to(batch.input_ids.device) for parts in zip(*score_parts, strict=True)))


class ServerTeacher:
    """Scores of completions that a server gives (``vllm serve``, ``posttrain serve``), by the client that rollouts use too.

    Args:
        client: A `posttrain.extensions.server.client.VLLMClient`, or what has its ``info`` and ``score``.
        axes: Of the run: k and temperature.
        expected: ``teacher_model_name_or_path``, which the server's model must be; None: any.
        probe: Token ids that the server scores before anything is trained.

    Attributes:
        name: The server's model, as the server says.

    Raises:
        ConfigError: Another model; k above the server's cap; a temperature other than 1, which servers do not apply to prompts.
        ModelError: The server scores another number of tokens than it is given, or scores that are no log-probs.
    """

    def __init__(self, client: Any, axes: Axes, *, expected: str | None, probe: list[int]) -> None:
        self.client, self.top_k = client, max(axes.top_k, 1)
        facts = client.info()
        self.name = name = str(facts.get("model") or facts.get("served") or "")
        if expected and name and Path(name).name != Path(expected).name:
            raise ConfigError(
                f"the server has the model {name!r}, and teacher_model_name_or_path names {expected!r}. Fix: start it with that "
                "model, or name the one it has."
            )
        if axes.support not in ("teacher_topk", "sampled", "top1_pair"):
            raise ConfigError(
                f"loss_top_k={axes.top_k} with beta={axes.beta}: a server gives its own likeliest ids and the sampled token, and "
                "this loss sees others. Fix: beta=0 with any loss_top_k, or loss_top_k=1."
            )
        # Our host has no limit but the vocabulary; vLLM's is an option of its own: 20 where the server does not name it, and
        # -1 for none.
        most = int(facts.get("max_logprobs") or 20)
        cap = int(facts["vocab_size"]) if most < 0 or facts.get("engine") in IN_WORKERS else most
        if self.top_k > cap:
            raise ConfigError(
                f"loss_top_k={self.top_k}: the server gives at most {cap} log-probs a position. Fix: loss_top_k={cap}, or start "
                f"it with --max-logprobs {self.top_k}."
            )
        if axes.teacher_temperature != 1:
            raise ConfigError(
                f"temperature={axes.teacher_temperature} with a teacher server: its log-probs of given tokens are at temperature "
                "1, and the student's would not be. Fix: temperature=1.0, or a teacher model in this process."
            )
        # vLLM generates a token behind what it scores, which must fit too.
        self.most = None if facts.get("max_model_len") is None else int(facts["max_model_len"]) - 1
        self.score([probe[:1]], [probe[1:]])

    def score(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Fields of `TokenScores` of all completions; every token has them, or this raises."""
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
        longest = max(map(len, whole), default=0)
        if self.most is not None and longest > self.most:
            raise DataError(
                f"a prompt and its completion have {longest} tokens, and the teacher server scores at most {self.most} "
                f"(max_model_len={self.most + 1}). Fix: max_length={self.most}, or start the server with a longer context."
            )
        replies = self.client.score(whole, [len(prompt) for prompt in prompts], top=self.top_k)
        for ids, reply in zip(completions, replies, strict=True):
            logps, actual = torch.tensor(reply.top_logps), torch.tensor(reply.logps)
            good = len(actual) == len(logps) == len(ids) and logps.shape[-1:] == (self.top_k,)
            finite = good and bool(logps.isfinite().all() and actual.isfinite().all())
            if not (finite and bool((logps.diff(dim=-1) <= 1e-6).all() and (logps <= 1e-4).all())):
                raise ModelError(
                    f"the teacher server scored {len(actual)} of {len(ids)} tokens with {logps.shape[-1]} of {self.top_k} "
                    "log-probs each, or scores that are not finite, falling log-probs. Fix: look at the server's log."
                )
        return [{"ids": reply.top_ids, "logps": reply.top_logps, "actual": reply.logps} for reply in replies]


def asked_servers(
    servers: Mapping[str, ServerTeacher], rollouts: Sequence[Rollout], numbers: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Of each rollout what the servers say of it, by their names; all servers are asked at once.

    Args:
        servers: By name.
        rollouts: Whose completions are scored.
        numbers: Of the one server that each is sent to; None: to all.
    """
    scores_of_each: list[dict[str, Any]] = [{} for _ in rollouts]

    def ask(number: int, name: str, server: ServerTeacher) -> None:
        chosen = [i for i in range(len(rollouts)) if numbers is None or numbers[i] == number]
        scores = server.score([rollouts[i].prompt_ids for i in chosen], [rollouts[i].token_ids for i in chosen])
        for i, score in zip(chosen, scores, strict=True):
            scores_of_each[i][name] = score

    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        list(pool.map(ask, range(len(servers)), servers, servers.values()))
    return scores_of_each


# Scores in a file: computed once, top-k with the mass outside, read without loading the teacher ----------------------

FORMAT = "posttrain teacher scores 2"
POSITIONS = 256  # Whose logits exist at once.
COLUMNS = {"ids": pa.int32(), "logps": pa.float32(), "actual": pa.float32()}


def identity(dataset: AnyDataset, tokenizer: Tokenizer) -> dict[str, str]:
    """Hashes of what scores depend on: the rows as ids, the vocabulary, the chat template."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(json.dumps([list(row["prompt_ids"]), list(row["completion_ids"])]).encode())
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return {"dataset": digest.hexdigest(), "tokenizer": str(hash_vocabulary(tokenizer)), "template": template}


def _scores(teacher: ModelTeacher, rows: Sequence[Row], *, top_k: int, columns: int) -> list[dict[str, list]]:
    """Top-k log-probs at temperature 1 of every completion token, one entry a row."""
    with teacher.running() as model:
        view = teacher.of_rows(rows, next(model.parameters()).device)
    targets = torch.tensor([t for row in rows for t in row.completions[0]], device=view.hidden.device)
    chunks = []
    for start in range(0, len(targets), POSITIONS):
        part = slice(start, start + POSITIONS)
        logp = view.logp(part, columns, 1.0)
        best = logp.topk(min(top_k, logp.shape[1]), -1)
        chunks.append((best.indices.cpu(), best.values.cpu(), logp.gather(1, targets[part, None]).cpu()))
    lengths = [len(row.completions[0]) for row in rows]
    split = (torch.cat(parts).split(lengths) for parts in zip(*chunks, strict=True))
    return [
        {name: x.flatten().tolist() for name, x in zip(COLUMNS, one, strict=True)} for one in zip(*split, strict=True)
    ]


def _check_scorer(teacher: Any, tokenizer: Tokenizer, mode: str) -> str:
    """Where the teacher comes from; refuse one that does not read the tokenizer's ids."""
    name, width = get_config_model_id(causal_lm(teacher).config), logit_width(teacher)
    if width < len(tokenizer):
        raise ModelError(
            f"the teacher has {width} logits, and the tokenizer {len(tokenizer)} tokens: they do not belong together."
        )
    own = None if mode == "off" else own_tokenizer(name, required=False)
    if own is not None:
        match = compare_tokenizers(tokenizer, own, widths=(None, width))
        require_same_tokens(match, mode=mode, method="teacher scores", on_policy=False)
    return name


def score_dataset(
    teacher: Any,
    dataset: AnyDataset,
    tokenizer: Tokenizer,
    path: str | Path,
    *,
    top_k: int = 64,
    max_length: int | None = None,
    max_prompt_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 16,
    tokenizer_check: Literal["error", "warn", "off"] = "error",
) -> int:
    """Write the teacher's scores of every answer of a dataset, for ``teacher_scores`` of a config; returns the rows.

    The file is Arrow's: a row an answer, in the order of the dataset, ``batch_size`` rows a record batch. It is there when it
    is whole.

    Args:
        teacher: A causal language model of the student's tokenizer.
        dataset: ``prompt`` and ``completion``, or ``messages``.
        tokenizer: The student's.
        path: Of the file.
        top_k: Ids per position, at least 1.
        max_length: As in the config that will read the file.
        max_prompt_length: Likewise.
        chat_template_kwargs: Likewise.
        batch_size: Rows that the teacher reads at a time.
        tokenizer_check: As in the config: what happens where the tokenizer of the teacher's own folder or id is another one.

    Raises:
        ConfigError: The teacher's tokenizer is another one; ``top_k`` or ``batch_size`` below 1.
        DataError: The dataset is a stream, empty, or without answers.
        ModelError: The teacher has fewer logits than the tokenizer has tokens.
    """
    for field, value in (("top_k", top_k), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{field}={value} must be at least 1.")
    name = _check_scorer(teacher, tokenizer, tokenizer_check)
    limits = {"max_length": max_length, "max_prompt_length": max_prompt_length}
    first_row(dataset, "scored")
    dataset = with_template_arguments(with_prompt_column(plain_rows(dataset)), chat_template_kwargs)
    if not isinstance(dataset, Sized) or "completion" not in dataset.column_names:
        raise DataError(
            f"scores are of a Dataset's answers, and this {type(dataset).__name__} has the columns {dataset.column_names}. Fix: "
            "'prompt' and 'completion', or 'messages'; of a stream Dataset.from_list(list(stream))."
        )
    dataset = tokenized_answers(dataset, tokenizer, name="dataset", **limits)
    install_token_head(teacher)
    running = functools.partial(frozen, teacher)
    runner = ModelTeacher(running, probe_layout(teacher), True, load.resolve_pad_token(tokenizer, teacher))
    facts = identity(dataset, tokenizer) | {"teacher": name, "top_k": top_k, "batch_size": batch_size}
    fields = [(name, pa.list_(kind)) for name, kind in COLUMNS.items()]
    schema = pa.schema(fields, metadata={"format": FORMAT, "facts": json.dumps(facts)})
    with (
        evaluating(teacher),
        whole_file(Path(path)) as draft,
        pa.OSFile(str(draft), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
    ):
        for start in tqdm.trange(0, len(dataset), batch_size, desc="teacher scores", unit="batch"):
            examples = dataset[start : start + batch_size]
            pairs = zip(examples["prompt_ids"], examples["completion_ids"], strict=True)
            rows = [Row(prompt, [ids], [[1] * len(ids)]) for prompt, ids in pairs]
            scores = _scores(runner, rows, top_k=top_k, columns=len(tokenizer))
            writer.write_batch(pa.RecordBatch.from_pylist(scores, schema))
    return len(dataset)


class ScoreFile:
    """Scores that `score_dataset` wrote, read row by row from a memory map.

    Args:
        path: Of the file.

    Raises:
        ConfigError: There is no such file, or it is none of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        if not Path(path).is_file():
            raise ConfigError(
                f"teacher_scores={self.path!r}: there is no such file. Fix: write it with posttrain teacher-scores."
            )
        try:
            self.reader = pa.ipc.open_file(pa.memory_map(self.path))
        except pa.ArrowInvalid as error:
            raise ConfigError(f"teacher_scores={self.path!r} is no Arrow file ({error}).") from error
        metadata = self.reader.schema.metadata or {}
        if metadata.get(b"format") != FORMAT.encode():
            raise ConfigError(f"teacher_scores={self.path!r} was not written by posttrain teacher-scores.")
        self.facts: dict[str, Any] = json.loads(metadata[b"facts"])

    def check(self, dataset: AnyDataset, tokenizer: Tokenizer, axes: Axes) -> None:
        """Refuse a file of another dataset, tokenizer or template, and a loss that its numbers are not of.

        Raises:
            DataError: A hash differs; names what and both hashes.
            ConfigError: The temperature is not 1; more ids than the file has, or one without a tail.
        """
        size = self.facts["top_k"]
        if axes.top_k > size:
            raise ConfigError(
                f"loss_top_k={axes.top_k} with teacher_scores={self.path!r}, which has {size} ids a token. Fix: at most {size}, "
                f"or compute the file again with --top_k {axes.top_k}."
            )
        if size == 1:
            replace(axes, top_k=1).check()
        if axes.teacher_temperature != 1:
            raise ConfigError(
                f"temperature={axes.teacher_temperature} with teacher_scores: the file has log-probs at temperature 1, and "
                "its tails cannot be tempered. Fix: temperature=1.0."
            )
        for name, value in identity(dataset, tokenizer).items():
            if self.facts[name] != value:
                raise DataError(
                    f"teacher_scores={self.path!r} is of another {name}: its hash is {self.facts[name][:12]}, and this run's "
                    f"{value[:12]}. Fix: compute the file again (posttrain teacher-scores) with this run's data and lengths."
                )

    def read(self, row: int, top_k: int = 0) -> TokenScores:
        """Scores of the dataset's row of that number; its ``top_k`` likeliest ids, 0: all that there are."""
        size = self.facts["batch_size"]
        one = self.reader.get_batch(row // size).slice(row % size, 1)
        ids, logps, actual = (np.array(one.column(name)[0].values) for name in COLUMNS)
        length = len(actual)
        ids, logps = (x.reshape(length, -1)[:, : top_k or None] for x in (ids.astype(np.int64), logps))
        arrays = (ids, logps, actual)
        return TokenScores(*map(torch.from_numpy, arrays))
