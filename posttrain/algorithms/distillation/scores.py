"""Teacher scores in a file: computed once, top-k with the mass outside, read without loading the teacher."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import tqdm

from posttrain.algorithms.distillation.config import Axes, logit_width
from posttrain.algorithms.distillation.data import tokenized_answers, with_prompt_column, with_template_arguments
from posttrain.algorithms.distillation.objective import TokenScores
from posttrain.algorithms.distillation.teacher import ModelTeacher, frozen
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.models import load
from posttrain.models.attention import probe_layout
from posttrain.models.heads import causal_lm, install_token_head
from posttrain.models.reference import hash_vocabulary
from posttrain.report.record import whole_file
from posttrain.types import Row

FORMAT = "posttrain teacher scores 2"
POSITIONS = 256  # Whose logits exist at once.
COLUMNS = {"ids": pa.int32(), "logps": pa.float32(), "actual": pa.float32()}


def identity(dataset: Any, tokenizer: Any) -> dict[str, str]:
    """Hashes of what scores depend on: the rows as ids, the vocabulary, the chat template."""
    digest = hashlib.sha256()
    for row in dataset:
        digest.update(json.dumps([list(row["prompt_ids"]), list(row["completion_ids"])]).encode())
    template = hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode()).hexdigest()
    return {"dataset": digest.hexdigest(), "tokenizer": str(hash_vocabulary(tokenizer)), "template": template}


def _scores(teacher: ModelTeacher, rows: Sequence[Row], *, top_k: int, columns: int) -> list[dict[str, list]]:
    """Top-k log-probs at temperature 1 of every completion token, one entry a row."""
    with teacher.running() as model:
        view = teacher.of_rows(rows, next(model.parameters()).device)
    targets = torch.tensor([t for row in rows for t in row.completions[0]], device=view.hidden.device)
    found = []
    for start in range(0, len(targets), POSITIONS):
        part = slice(start, start + POSITIONS)
        logp = view.logp(part, columns, 1.0)
        best = logp.topk(min(top_k, logp.shape[1]), -1)
        found.append((best.indices.cpu(), best.values.cpu(), logp.gather(1, targets[part, None]).cpu()))
    lengths = [len(row.completions[0]) for row in rows]
    split = (torch.cat(parts).split(lengths) for parts in zip(*found, strict=True))
    return [
        {name: x.flatten().tolist() for name, x in zip(COLUMNS, one, strict=True)} for one in zip(*split, strict=True)
    ]


def score_dataset(
    teacher: Any,
    dataset: Any,
    tokenizer: Any,
    path: str | Path,
    *,
    top_k: int = 64,
    max_length: int | None = None,
    max_prompt_length: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    batch_size: int = 16,
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

    Raises:
        ConfigError: ``top_k`` or ``batch_size`` below 1.
        ModelError: The teacher has fewer logits than the tokenizer has tokens.
    """
    for field, value in (("top_k", top_k), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{field}={value} must be at least 1.")
    width = logit_width(teacher)
    if width < len(tokenizer):
        raise ModelError(
            f"the teacher has {width} logits, and the tokenizer {len(tokenizer)} tokens: they do not belong together."
        )
    limits = {"max_length": max_length, "max_prompt_length": max_prompt_length}
    dataset = with_template_arguments(with_prompt_column(dataset), chat_template_kwargs)
    dataset = tokenized_answers(dataset, tokenizer, name="dataset", **limits)
    install_token_head(teacher)
    running = functools.partial(frozen, teacher.requires_grad_(False).eval())
    runner = ModelTeacher(running, probe_layout(teacher), True, load.resolve_pad_token(tokenizer, teacher))
    name = load.get_config_model_id(causal_lm(teacher).config)
    facts = identity(dataset, tokenizer) | {"teacher": name, "top_k": top_k, "batch_size": batch_size}
    fields = [(name, pa.list_(kind)) for name, kind in COLUMNS.items()]
    schema = pa.schema(fields, metadata={"format": FORMAT, "facts": json.dumps(facts)})
    with whole_file(Path(path)) as draft, pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in tqdm.trange(0, len(dataset), batch_size, desc="teacher scores", unit="batch"):
            found = dataset[start : start + batch_size]
            pairs = zip(found["prompt_ids"], found["completion_ids"], strict=True)
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

    def check(self, dataset: Any, tokenizer: Any, axes: Axes) -> None:
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
