"""`posttrain teacher-scores`: a teacher's scores of a dataset, computed once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

from posttrain.fields import option, read_mapping


@dataclass
class TeacherScoresArguments:
    """Which teacher scores which answers, and how they are cut."""

    teacher_model_name_or_path: str = field(metadata={"help": "The teacher."})
    model_name_or_path: str = field(metadata={"help": "The student; only its tokenizer is loaded."})
    dataset_name: str = field(metadata={"help": "Hub id, folder or file, with prompt and completion, or messages."})
    output: str = field(metadata={"help": "Path of the file, which a config reads as teacher_scores."})
    dataset_config: str | None = option(None, "Configuration of a hub dataset.")
    dataset_train_split: str = option("train", "Split to score.")
    top_k: int = option(64, "Ids per position; the mass outside is kept as one number.")
    max_length: int | None = option(1024, "As in the config that reads the file; GKD has 1024.")
    max_prompt_length: int | None = option(None, "As in the config that reads the file.")
    chat_template_kwargs: str | None = option(None, "As there, as JSON.")
    batch_size: int = option(16, "Rows that the teacher reads at a time.")
    tokenizer_check: Literal["error", "warn", "off"] = option("error", "What happens where the tokenizers differ.")
    trust_remote_code: bool = option(False, "Allow code from the models' repositories.")


def run(argv: list[str]) -> int:
    """Write the file and say what it holds."""
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
    sys.stdout.write(f"{args.output}: scores of {rows} answers, {args.top_k} ids a token\n")
    return 0
