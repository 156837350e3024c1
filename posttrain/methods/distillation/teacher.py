"""Sources of a teacher's outputs: another model, the student itself, a file of scores, or a server."""

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

from posttrain.checks.registry import describe
from posttrain.checks.tokenizers import compare_tokenizers, require_same_tokens
from posttrain.data.forest import Layout, collate, sequences, share_prompts
from posttrain.data.formats import first_row, plain_rows
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.methods.distillation.config import Axes, logit_width
from posttrain.methods.distillation.data import tokenized_answers, with_prompt_column, with_template_arguments
from posttrain.methods.distillation.objective import HiddenTeacher, TeacherShare, TokenScores, capture
from posttrain.models import load
from posttrain.models.architecture import get_config_model_id
from posttrain.models.forward import forward
from posttrain.models.heads import causal_lm, evaluating, install_token_head
from posttrain.models.probe import probe_layout
from posttrain.models.reference import Reference, hash_vocabulary
from posttrain.models.token_split import alone
from posttrain.report.files import whole_file
from posttrain.rollouts.engines import IN_WORKERS
from posttrain.types import Batch, Rollout, Row

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from posttrain.methods.config import PostTrainingConfig
    from posttrain.types import AnyDataset, Tokenizer

logger = logging.getLogger(__name__)


def by_name(teachers: Any) -> dict[str, Any]:
    """Return a mapping from names to teachers. A single teacher has the name ""."""
    return dict(teachers) if isinstance(teachers, Mapping) else {"": teachers}


def load_teacher(teacher: object, args: PostTrainingConfig, student: nn.Module) -> nn.Module:
    """Return the teacher as a frozen model in evaluation mode. The model is loaded if the teacher is a folder or Hub id.

    Args:
        teacher: Model, folder or Hub id. None: the config's ``teacher_model_name_or_path``.
        args: Config of the trainer.
        student: The student. It must not be the same object as the teacher.

    Raises:
        ConfigError: No teacher is set, or teacher and student are the same object.
    """
    teacher = teacher if teacher is not None else args.teacher_model_name_or_path
    if teacher is None:
        raise ConfigError(
            "no teacher is set. Fix: set teacher_model (a model, folder or Hub id), teacher_scores (a file), or "
            "teacher_model_server_url. To use the student itself as teacher, set teacher_model_kind='base', 'live' or 'ema'."
        )
    if isinstance(teacher, nn.Module):
        if causal_lm(teacher) is causal_lm(student):
            raise ConfigError(
                "teacher_model is the student object itself, so the divergence would be 0 at every step. Fix: pass another "
                "model, or set teacher_model_kind='base' to use the student's initial weights as teacher."
            )
        return teacher.requires_grad_(False).eval()
    kwargs: dict[str, Any] = {"dtype": "auto", "trust_remote_code": args.trust_remote_code}
    kwargs |= {} if args.teacher_model_revision is None else {"revision": args.teacher_model_revision}
    kwargs |= load.with_dtype(args.teacher_model_init_kwargs or {})
    return load.create_model_from_path(teacher, **kwargs).requires_grad_(False).eval()


def teacher_id(teacher: object, args: PostTrainingConfig) -> str:
    """Return the Hub id or folder of a teacher. For a model object, return the Hub id or folder from which it was loaded, or
    "" if it was not loaded.
    """
    if isinstance(teacher, nn.Module):
        return get_config_model_id(causal_lm(teacher).config)
    return teacher or args.teacher_model_name_or_path or ""


def own_tokenizer(name: str, *, required: bool, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load the tokenizer of a teacher from the teacher's folder or Hub id.

    Args:
        name: Folder or Hub id from `teacher_id`, or the name of a server's model.
        required: Whether a missing tokenizer is an error. If False, log a warning and return None.
        trust_remote_code: Whether to run Python code from the teacher's repository.
        revision: Revision of the teacher.

    Raises:
        ModelError: The tokenizer is required and cannot be loaded.
    """
    try:
        return load.load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    except ModelError as error:
        if required:
            raise
        text = "the teacher's tokenizer was not found. It is assumed to have the student's token ids: %s. Fix: "
        logger.warning(text + "pass teacher_processing_class.", str(error).split(" Fix: ")[0].rstrip("."))
        return None


@contextmanager
def frozen(model: nn.Module, autocast: Callable[[], AbstractContextManager] = nullcontext) -> Iterator[nn.Module]:
    """Run a teacher model inside the context without gradients and in the student's precision.

    If the teacher had another precision, rounding differences would be part of the divergence.
    """
    with torch.no_grad(), autocast():
        yield model


@dataclass
class ModelTeacher:
    """Teacher model in this process. Its logits are computed only at positions where they are compared with the student's
    logits.

    Attributes:
        running: Context manager that yields the model in evaluation mode, without gradients. It may activate another
            adapter.
        layout: Layout of sequences in the teacher's batch rows. Prefix trees are used if a probe shows that they are exact.
        shared: Whether the teacher can use the student's batches, because their layout is also exact for the teacher.
        pad_token_id: Pad token of the teacher's batches.
    """

    running: Callable[[], AbstractContextManager[nn.Module]]
    layout: Layout
    shared: bool
    pad_token_id: int

    def of_batch(self, batch: Batch, members: Sequence[int] | None = None) -> HiddenTeacher:
        """Compute the teacher's outputs at the loss positions of the student's batch.

        ``members`` are the indices of the sequences to compute. None: the outputs for all sequences are computed.
        """
        if members is not None or not self.shared:
            rows = sequences(batch)
            return self.of_rows(rows if members is None else [rows[k] for k in members], batch.input_ids.device)
        with self.running() as model, alone(model):
            return forward(model, batch, frozenset(), compare=capture).compared["teacher"]

    def of_rows(self, rows: Sequence[Row], device: torch.device | str) -> HiddenTeacher:
        """Compute the teacher's outputs at the loss tokens of all completions. A shared prompt of several rows is computed
        once.
        """
        bare = [Row(row.prompt_ids, row.completions, row.loss_masks, pictures=row.pictures) for row in rows]
        shared, places = share_prompts(bare)
        pieces: list[Tensor] = [torch.empty(0)] * len(places)
        view: Any = None
        with self.running() as model, alone(model):
            for batch in collate(shared, pad_token_id=self.pad_token_id, layout=self.layout):
                view = forward(model, batch.to(device), frozenset(), compare=capture).compared["teacher"]
                counts = torch.bincount(batch.sequence[batch.loss_mask], minlength=batch.num_sequences).tolist()
                for origin, piece in zip(batch.origin, view.hidden.split(counts), strict=True):
                    pieces[places[origin]] = piece
        return replace(view, hidden=torch.cat(pieces))

    def of_prompts(self, batch: Batch, prompt_of: Callable[[int], list[int]]) -> HiddenTeacher:
        """Compute the teacher's outputs for the same completions after different prompts. ``prompt_of`` maps a number in the
        batch's column ``key`` to the teacher's prompt of that sequence.
        """
        rows = [Row(prompt_of(key), [ids], [mask]) for key, ids, mask in _keyed(batch)]
        return self.of_rows(rows, batch.input_ids.device)


class AdapterAverage(transformers.TrainerCallback):
    """Updates a teacher adapter as a moving average of the student's adapter. The teacher adapter starts as a copy of the
    student's adapter.

    The LoRA factors A and B are averaged separately. For a small update rate, the product of the averages is close to the
    average of the products.

    Args:
        teacher: Reference that contains the teacher adapter.
    """

    def __init__(self, teacher: Reference) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Update the teacher adapter every ``teacher_sync_steps`` optimizer steps."""
        if state.global_step % args.teacher_sync_steps:
            return
        named = dict(self.teacher.policy.named_parameters())
        mine, theirs = f".{self.teacher.adapter}", f".{self.teacher.policy.active_adapter}"
        for name, parameter in named.items():
            if f"{mine}." in f"{name}.":
                parameter.lerp_(named[name.replace(mine, theirs)], args.teacher_update_rate)


def _keyed(batch: Batch) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield ``(key, completion, loss mask)`` for every sequence, in the order of the loss positions."""
    for row in sequences(batch):
        for key, ids, mask in zip(row.sequence_columns["key"], row.completions, row.loss_masks, strict=True):
            yield int(key), ids, mask


def shares_of_batch(
    batch: Batch, weights: Mapping[str, float] | None, names: Sequence[str], say: Callable[[str, list[int] | None], Any]
) -> dict[str, TeacherShare]:
    """Return the outputs of several teachers for a batch. Each teacher scores only the sequences that are assigned to it.

    Args:
        batch: Batch. If ``weights`` is None, its column ``teacher`` contains the teacher number of each sequence.
        weights: Weight of each teacher's divergence, by the teacher's name. Every teacher then scores every sequence. None:
            the column ``teacher`` assigns sequences to teachers.
        names: Names of the teachers, in the order of their numbers.
        say: Function that returns the outputs of a teacher. Its arguments are the teacher's name and a list of sequence
            indices (None: all sequences).
    """
    if weights is not None:
        return {name: TeacherShare(say(name, None), weight=weights[name]) for name in names if weights[name]}
    numbers, places, shares = batch.columns["teacher"].tolist(), batch.sequence[batch.loss_mask], {}
    for number, name in enumerate(names):
        members = [k for k, teacher in enumerate(numbers) if teacher == number]
        rows = torch.isin(places, places.new_tensor(members)).nonzero().flatten()
        whole = len(members) == len(numbers)
        # A teacher without sequences in this batch is not run. The result still contains an item for it, so that this batch
        # is included in the metric of the fraction of tokens that the teacher scores.
        shares[name] = TeacherShare(say(name, None if whole else members) if members else None, rows)
    return shares


def scores_of_batch(
    batch: Batch, scores: Callable[[int], TokenScores], members: Sequence[int] | None = None
) -> TokenScores:
    """Return the scores of the batch's loss tokens. ``scores`` maps a number in the batch's column ``key`` to the scores of
    one sequence.

    ``members`` are the indices of the sequences to score. None: all sequences are scored.
    """
    score_parts, keyed = [], list(_keyed(batch))
    for key, ids, mask in keyed if members is None else [keyed[k] for k in members]:
        result = scores(key)
        # A completion without ids was excluded from the loss, so mask its tokens.
        if not ids:
            mask = [0] * len(result.actual)
        selected = torch.tensor(mask, dtype=torch.bool)
        if len(result.actual) != len(selected):
            raise ModelError(
                f"the teacher returned scores for {len(result.actual)} tokens, but the completion has {len(ids)} tokens."
            )
        score_parts.append((result.ids[selected], result.logps[selected], result.actual[selected]))
    return TokenScores(*(torch.cat(parts).to(batch.input_ids.device) for parts in zip(*score_parts, strict=True)))


class ServerTeacher:
    """Teacher on a server (``vllm serve`` or ``posttrain serve``). It is called with the client of rollout servers.

    Args:
        client: A `posttrain.extensions.server.client.VLLMClient`, or an object with its methods ``info`` and ``score``.
        axes: Properties of the loss. Only the number of ids k and the temperature are used.
        expected: Name of the model that the server must have (``teacher_model_name_or_path``). None: any model is accepted.
        probe: Token ids that the server scores before training begins.

    Attributes:
        name: Name of the model that the server reports.

    Raises:
        ConfigError: The server has another model, k is above the server's limit, or the temperature is not 1. Servers return
            log-probs of prompts only at temperature 1.
        ModelError: The server returns a wrong number of scores, or scores that are not log-probs.
    """

    def __init__(self, client: Any, axes: Axes, *, expected: str | None, probe: list[int]) -> None:
        self.client, self.top_k = client, max(axes.top_k, 1)
        facts = client.info()
        self.name = name = str(facts.get("model") or facts.get("served") or "")
        if expected and name and Path(name).name != Path(expected).name:
            raise ConfigError(
                f"the server has the model {name!r}, but teacher_model_name_or_path is {expected!r}. Fix: start the "
                "server with that model, or set teacher_model_name_or_path to the server's model."
            )
        if axes.support not in ("teacher_topk", "sampled", "top1_pair"):
            raise ConfigError(
                f"loss_top_k={axes.top_k} with beta={axes.beta} needs the teacher's log-probs of the student's most likely "
                "ids, but a teacher server returns only log-probs of the teacher's most likely ids and of the sampled token. "
                "Fix: set beta=0, or set loss_top_k=1."
            )
        # The maximum number of log-probs is an option of a vLLM server, where -1 means no limit. A server that does not
        # report it is assumed to have vLLM's default of 20. `posttrain serve` is limited only by the vocabulary size.
        most = int(facts.get("max_logprobs") or 20)
        cap = int(facts["vocab_size"]) if most < 0 or facts.get("engine") in IN_WORKERS else most
        if self.top_k > cap:
            raise ConfigError(
                f"loss_top_k={self.top_k}: the server returns up to {cap} log-probs per position. Fix: set "
                f"loss_top_k={cap}, or start the server with --max-logprobs {self.top_k}."
            )
        if axes.teacher_temperature != 1:
            raise ConfigError(
                f"temperature={axes.teacher_temperature} is not supported with a teacher server, because the server computes "
                "log-probs only at temperature 1. Fix: set temperature=1.0, or use a teacher model in this process."
            )
        # Reserve one position. vLLM always generates one token after the scored text, and this token must also fit into the
        # context.
        self.most = None if facts.get("max_model_len") is None else int(facts["max_model_len"]) - 1
        self.score([probe[:1]], [probe[1:]])

    def score(self, prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> list[dict[str, Any]]:
        """Request the scores of completions from the server. Return the fields of `TokenScores` for each completion. Raise
        an error if a token has no score.
        """
        whole = [[*prompt, *ids] for prompt, ids in zip(prompts, completions, strict=True)]
        longest = max(map(len, whole), default=0)
        if self.most is not None and longest > self.most:
            raise DataError(
                f"a prompt and its completion have {longest} tokens, but the teacher server can score at most {self.most} "
                f"tokens (max_model_len={self.most + 1}). Fix: set max_length={self.most}, or start the server with a larger "
                "max_model_len."
            )
        replies = self.client.score(whole, [len(prompt) for prompt in prompts], top=self.top_k)
        for ids, reply in zip(completions, replies, strict=True):
            logps, actual = torch.tensor(reply.top_logps), torch.tensor(reply.logps)
            good = len(actual) == len(logps) == len(ids) and logps.shape[-1:] == (self.top_k,)
            finite = good and bool(logps.isfinite().all() and actual.isfinite().all())
            if not (finite and bool((logps.diff(dim=-1) <= 1e-6).all() and (logps <= 1e-4).all())):
                raise ModelError(
                    f"the response of the teacher server is invalid. It has scores of {len(actual)} tokens with "
                    f"{logps.shape[-1]} log-probs each. Expected are {len(ids)} tokens with {self.top_k} log-probs each, all "
                    "finite and in descending order. Look for errors in the server's log."
                )
        return [{"ids": reply.top_ids, "logps": reply.top_logps, "actual": reply.logps} for reply in replies]


def teacher_servers(
    servers: Mapping[str, ServerTeacher], rollouts: Sequence[Rollout], numbers: Sequence[float] | None
) -> list[dict[str, Any]]:
    """Request the scores of rollouts from several servers at the same time. Return the scores of each rollout by server
    name.

    Args:
        servers: Servers by name.
        rollouts: Rollouts whose completions are scored.
        numbers: Number of the server that scores each rollout. None: every server scores every rollout.
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


# Files with the teacher's top-k log-probs, so that training does not need the teacher model ---------------------------

FORMAT = "posttrain teacher scores 2"
POSITIONS = 256  # Number of positions whose logits are in memory at the same time.
COLUMNS = {"ids": pa.int32(), "logps": pa.float32(), "actual": pa.float32()}


def identity(dataset: AnyDataset, tokenizer: Tokenizer) -> dict[str, str]:
    """Compute hashes of all inputs that determine scores: the token ids of rows, the vocabulary and the chat template."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(json.dumps([list(row["prompt_ids"]), list(row["completion_ids"])]).encode())
    template = hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()
    return {"dataset": digest.hexdigest(), "tokenizer": str(hash_vocabulary(tokenizer)), "template": template}


def _scores(teacher: ModelTeacher, rows: Sequence[Row], *, top_k: int, columns: int) -> list[dict[str, list]]:
    """Compute the teacher's top-k log-probs at temperature 1 for each completion token. The result has one item per row."""
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
        {name: x.flatten().tolist() for name, x in zip(COLUMNS, item, strict=True)} for item in zip(*split, strict=True)
    ]


def _check_scorer(teacher: Any, tokenizer: Tokenizer, mode: str) -> str:
    """Return the teacher's Hub id or folder. Raise an error if the token ids of teacher and tokenizer differ."""
    name, width = get_config_model_id(causal_lm(teacher).config), logit_width(teacher)
    if width < len(tokenizer):
        raise ModelError(
            f"the teacher has {width} logits, but the tokenizer has {len(tokenizer)} tokens, so the tokenizer is not the "
            "teacher's."
        )
    own = None if mode == "off" else own_tokenizer(name, required=False)
    if own is not None:
        match = compare_tokenizers(tokenizer, own, widths=(None, width))
        for finding in require_same_tokens(match, mode=mode, method="teacher scores", on_policy=False):
            logger.warning("%s", describe(finding))
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
    """Write the teacher's scores of all answers of a dataset to a file, and return the number of rows.

    Pass the path of this file as ``teacher_scores`` in a config. The file is an Arrow file with one row per answer, in the
    order of the dataset, and ``batch_size`` rows per record batch. It is created at ``path`` after all rows are written.

    Args:
        teacher: Causal language model that uses the student's tokenizer.
        dataset: Dataset with the columns ``prompt`` and ``completion``, or ``messages``.
        tokenizer: The student's tokenizer.
        path: Path of the file.
        top_k: Number of token ids per position whose log-probs are stored, at least 1.
        max_length: Value of ``max_length`` in the config of the training run.
        max_prompt_length: Value of ``max_prompt_length`` in the config of the training run.
        chat_template_kwargs: Value of ``chat_template_kwargs`` in the config of the training run.
        batch_size: Number of rows per forward pass of the teacher.
        tokenizer_check: Reaction to a teacher whose own tokenizer differs from ``tokenizer``: ``error``, ``warn`` or
            ``off``.

    Raises:
        ConfigError: The teacher's tokenizer differs from ``tokenizer``, or ``top_k`` or ``batch_size`` is below 1.
        DataError: The dataset is a stream, is empty or has no answers.
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
            "scores need a Dataset with the columns 'prompt' and 'completion', or 'messages', but this "
            f"{type(dataset).__name__} has the columns {dataset.column_names}. Fix: pass such a dataset. A stream can be "
            "converted with Dataset.from_list(list(stream))."
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
    """File of scores that `score_dataset` wrote. The file is memory-mapped, and each row is read when it is needed.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: The file does not exist, or was not written by `score_dataset`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        if not Path(path).is_file():
            raise ConfigError(
                f"teacher_scores={self.path!r}: the file does not exist. Fix: create it with posttrain teacher-scores."
            )
        try:
            self.reader = pa.ipc.open_file(pa.memory_map(self.path))
        except pa.ArrowInvalid as error:
            raise ConfigError(f"teacher_scores={self.path!r} is not an Arrow file ({error}).") from error
        metadata = self.reader.schema.metadata or {}
        if metadata.get(b"format") != FORMAT.encode():
            raise ConfigError(f"teacher_scores={self.path!r} was not written by posttrain teacher-scores.")
        self.facts: dict[str, Any] = json.loads(metadata[b"facts"])

    def check(self, dataset: AnyDataset, tokenizer: Tokenizer, axes: Axes) -> None:
        """Check that the scores belong to this dataset, tokenizer and chat template, and have enough ids for the loss.

        Raises:
            DataError: The scores were computed with another dataset, tokenizer or chat template. The message contains both
                hashes.
            ConfigError: The temperature is not 1, or the loss needs more ids than the file has.
        """
        size = self.facts["top_k"]
        if axes.top_k > size:
            raise ConfigError(
                f"loss_top_k={axes.top_k} needs more ids per token than teacher_scores={self.path!r} contains ({size}). Fix: "
                f"set loss_top_k to at most {size}, or compute the file again with --top_k {axes.top_k}."
            )
        if size == 1:
            replace(axes, top_k=1).check()
        if axes.teacher_temperature != 1:
            raise ConfigError(
                f"temperature={axes.teacher_temperature} is not supported with teacher_scores. The file contains top-k "
                "log-probs at temperature 1, which cannot be converted to another temperature, because the log-probs of all "
                "other tokens are missing. Fix: set temperature=1.0."
            )
        for name, value in identity(dataset, tokenizer).items():
            if self.facts[name] != value:
                raise DataError(
                    f"teacher_scores={self.path!r} was computed with another {name}: its hash is "
                    f"{self.facts[name][:12]}, and the hash of this run is {value[:12]}. Fix: compute the file again "
                    "(posttrain teacher-scores) with the data and lengths of this run."
                )

    def read(self, row: int, top_k: int = 0) -> TokenScores:
        """Return the scores of one dataset row for the ``top_k`` most likely ids per token. With ``top_k=0``, return the
        scores of all ids in the file.
        """
        size = self.facts["batch_size"]
        record = self.reader.get_batch(row // size).slice(row % size, 1)
        ids, logps, actual = (np.array(record.column(name)[0].values) for name in COLUMNS)
        length = len(actual)
        ids, logps = (x.reshape(length, -1)[:, : top_k or None] for x in (ids.astype(np.int64), logps))
        arrays = (ids, logps, actual)
        return TokenScores(*map(torch.from_numpy, arrays))
