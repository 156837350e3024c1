"""Model card: a README that describes a trained model, its training, and its use."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.chat import template_text
from posttrain.errors import check_choice
from posttrain.integrations import require
from posttrain.models.architecture import get_config_model_id
from posttrain.models.heads import causal_lm
from posttrain.redaction import hide_secrets
from posttrain.report.files import whole_file
from posttrain.report.templates import TEMPLATES

if TYPE_CHECKING:
    from huggingface_hub import ModelCard
    from torch import nn

    from posttrain.methods.config import PostTrainingConfig


logger = logging.getLogger(__name__)

HUB = "https://huggingface.co"
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
PURPOSE = "the model card"

TEMPLATE = TEMPLATES / "card.md.jinja"
# Tasks for which the model card has a quick start.
TASKS = ("text-generation", "text-classification")


def generate_model_card(
    *,
    model_name: str,
    trainer_name: str,
    base_model: str | None = None,
    hub_model_id: str | None = None,
    dataset_name: str | list[str] | None = None,
    tags: str | Iterable[str] | None = None,
    wandb_url: str | None = None,
    trackio_url: str | None = None,
    comet_url: str | None = None,
    paper_title: str | None = None,
    paper_id: str | None = None,
    trainer_citation: str | None = None,
    task: str = "text-generation",
    chat: bool = True,
) -> ModelCard:
    """Generate the card of a trained model.

    Args:
        model_name: Title of the card.
        trainer_name: Name of the method: SFT, DPO, ...
        base_model: Hub id of the model from which training started. None if this model is not on the Hub.
        hub_model_id: Hub id of the trained model. Without an id, the quick start uses ``model_name``.
        dataset_name: Hub ids or names of the training datasets.
        tags: Tags to add to the metadata, after ``generated_from_trainer``.
        wandb_url: URL of the run on Weights & Biases. None: no link.
        trackio_url: URL of the run on Trackio. None: no link.
        comet_url: URL of the run on Comet. None: no link.
        paper_title: Title of the paper that introduced the method.
        paper_id: arXiv id of the method's paper.
        trainer_citation: BibTeX entry of the method's paper.
        task: ``text-generation``, or ``text-classification`` for a reward model.
        chat: Whether the quick start of a generative model uses messages. If False, the quick start uses plain text.

    Returns:
        The card. ``str(card)`` is its text, and ``card.save(path)`` writes it.

    Raises:
        ConfigError: The ``task`` is unknown.
    """
    from huggingface_hub import ModelCard, ModelCardData

    check_choice("task", task, TASKS)
    datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or [])
    own_tags = [tags] if isinstance(tags, str) else list(tags or [])
    metadata = ModelCardData(
        base_model=base_model,
        datasets=[name for name in datasets if _is_hub_id(name)] or None,
        library_name="transformers",
        model_name=model_name,
        pipeline_tag=task,
        tags=list(dict.fromkeys(["generated_from_trainer", *own_tags])),
    )
    return ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        hub=HUB,
        trained_on=[(name, _is_hub_id(name)) for name in datasets],
        trainer_name=trainer_name,
        model=hub_model_id or model_name,
        chat=chat,
        paper_title=paper_title,
        paper_id=paper_id,
        runs={"Weights & Biases": wandb_url, "Trackio": trackio_url, "Comet": comet_url},
        versions=_versions(),
        citation=trainer_citation,
    )


def create_model_card(
    trainer: Any,
    model_name: str | None = None,
    dataset_name: str | list[str] | None = None,
    tags: str | Iterable[str] | None = None,
) -> None:
    """Write ``<output_dir>/README.md`` for a trainer's model, on the main process only.

    The name, tags and paper of the method are attributes of the trainer's class: ``_name``, ``_tag_names`` and ``_paper``.
    ``_paper`` is a mapping with ``title``, ``id`` and ``citation``, or empty.

    Args:
        trainer: Any trainer.
        model_name: Title of the card. None: the last part of ``hub_model_id`` or, if it is not set, of ``output_dir``.
        dataset_name: Hub ids or names of the training datasets.
        tags: Tags in addition to the tags of the trainer's class.
    """
    if not trainer.is_world_process_zero():
        return
    args, config = trainer.args, trainer.model.config
    folder = Path(args.output_dir or ".")
    name = model_name or (args.hub_model_id or folder.resolve().name).split("/")[-1]
    paper = getattr(trainer, "_paper", None) or {}
    trackio_url = _trackio_url(args)
    tokenizer = getattr(trainer, "processing_class", None)
    card = generate_model_card(
        model_name=name,
        trainer_name=getattr(trainer, "_name", None) or type(trainer).__name__,
        base_model=_base_model(config),
        hub_model_id=getattr(trainer, "hub_model_id", None) or args.hub_model_id,
        dataset_name=dataset_name,
        tags=_tags(tags, getattr(trainer, "_tag_names", []), config, trackio_url),
        wandb_url=_live_url("wandb", lambda wandb: wandb.run),
        comet_url=_live_url("comet_ml", lambda comet: comet.get_running_experiment()),
        trackio_url=trackio_url,
        paper_title=paper.get("title"),
        paper_id=paper.get("id"),
        trainer_citation=paper.get("citation"),
        task=_task(trainer.model),
        chat=bool(template_text(tokenizer)),
    )
    with whole_file(folder / "README.md") as part:
        part.write_text(hide_secrets(str(card)), encoding="utf-8")


# Information from the trainer ------------------------------------------------------------------------------------


def _tags(tags: str | Iterable[str] | None, own: Iterable[str], config: Any, trackio_url: str | None) -> list[str]:
    """Merge the caller's tags and the trainer class's tags with tags about the environment, in a fixed order."""
    all_tags = (
        [tags] if isinstance(tags, str) else sorted(tags) if isinstance(tags, set | frozenset) else list(tags or [])
    )
    all_tags += own
    if getattr(config, "unsloth_version", None) is not None:
        all_tags.append("unsloth")
    if "JOB_ID" in os.environ:
        all_tags.append("hf_jobs")
    if trackio_url is not None:
        all_tags = [tag for tag in all_tags if not tag.startswith("trackio:")] + [f"trackio:{trackio_url}"]
    return list(dict.fromkeys(all_tags))


def _base_model(config: Any) -> str | None:
    """Return the Hub id of the base model. Return None for a local folder, because readers of the card cannot access it."""
    identity = get_config_model_id(config)
    return identity if _is_hub_id(identity) and not Path(identity).is_dir() else None


def _is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None


def _task(model: nn.Module) -> str:
    name = type(causal_lm(model)).__name__
    return TASKS[name.endswith("ForSequenceClassification")]


def _live_url(package: str, run_of: Any) -> str | None:
    """Return the URL of a tracker's active run, or None if the tracker's package was not imported."""
    if package not in sys.modules:
        return None
    run = run_of(require(package, PURPOSE))
    return None if run is None else getattr(run, "url", None)


def _trackio_url(args: PostTrainingConfig) -> str | None:
    if "trackio" not in sys.modules:
        return None
    space = getattr(args, "trackio_static_space_id", None)
    space = space or require("trackio.context_vars", PURPOSE).current_space_id.get()
    return f"{HUB}/spaces/{space}" if space else None


def _versions() -> dict[str, str]:
    import datasets
    import tokenizers
    import torch
    import transformers

    import posttrain

    packages = (posttrain, transformers, torch, datasets, tokenizers)
    return {package.__name__: str(package.__version__) for package in packages}
