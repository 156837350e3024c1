"""Command `posttrain teacher-scores`, which computes a teacher's log-probs of a dataset's answers and writes them to a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

from posttrain.fields import option, read_mapping


@dataclass
class TeacherScoresArguments:
    """Arguments that select teacher, student tokenizer, dataset and truncation."""

    teacher_model_name_or_path: str = field(metadata={"help": "Teacher model."})
    model_name_or_path: str = field(metadata={"help": "Student model. Only its tokenizer is loaded."})
    dataset_name: str = field(metadata={"help": "Hub id, folder or file, with prompt and completion, or messages."})
    output: str = field(
        metadata={
            "help": "Path of the output file. In the config of the training run, set teacher_scores to this path."
        }
    )
    dataset_config: str | None = option(None, "Configuration of a Hub dataset.")
    dataset_train_split: str = option("train", "Split to score.")
    top_k: int = option(
        64,
        "Number of most likely token ids per position whose log-probs are stored. The log-prob of the answer's own "
        "token is always stored.",
    )
    max_length: int | None = option(
        1024,
        "Maximum number of tokens per row. The training run that reads the scores must set the same max_length. GKD's "
        "default is 1024.",
    )
    max_prompt_length: int | None = option(
        None,
        "Maximum number of tokens per prompt. The training run that reads the scores must set the same max_prompt_length.",
    )
    chat_template_kwargs: str | None = option(
        None,
        "Arguments of the chat template as JSON. The training run that reads the scores must set the same "
        "chat_template_kwargs.",
    )
    batch_size: int = option(16, "Number of rows per forward pass of the teacher.")
    tokenizer_check: Literal["error", "warn", "off"] = option(
        "error",
        "What to do if the tokenizers of student and teacher differ. 'error': raise an error. 'warn': log a warning. "
        "'off': do not compare them.",
    )
    trust_remote_code: bool = option(False, "Allow Python code from the repositories of student and teacher to run.")


def run(argv: list[str]) -> int:
    """Compute the teacher's scores, write them to the output file, and print a summary."""
    from posttrain.cli.parser import PosttrainArgumentParser
    from posttrain.data.mixture import load_rows
    from posttrain.methods.distillation.teacher import score_dataset
    from posttrain.models.load import create_model_from_path, load_tokenizer

    (args,) = PosttrainArgumentParser(TeacherScoresArguments, prog="posttrain teacher-scores").parse_args_and_config(
        argv
    )
    args.chat_template_kwargs = read_mapping("chat_template_kwargs", args.chat_template_kwargs)
    data = load_rows(args.dataset_name, name=args.dataset_config, split=args.dataset_train_split)
    trust = {"trust_remote_code": args.trust_remote_code}
    teacher = create_model_from_path(args.teacher_model_name_or_path, dtype="auto", **trust)
    tokenizer = load_tokenizer(args.model_name_or_path, **trust)
    rows = score_dataset(
        teacher, data, tokenizer, args.output, top_k=args.top_k, chat_template_kwargs=args.chat_template_kwargs,
        max_length=args.max_length, max_prompt_length=args.max_prompt_length, batch_size=args.batch_size,
        tokenizer_check=args.tokenizer_check,
    )  # fmt: skip
    sys.stdout.write(f"{args.output}: scores of {rows} answers, {args.top_k} ids per token\n")
    return 0
