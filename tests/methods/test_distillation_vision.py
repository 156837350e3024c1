"""Distillation on rows with pictures: student and teacher each see them through their own tower."""

import datasets
import pytest
import torch

import posttrain as pt
from posttrain.errors import ConfigError, DataError
from posttrain.extensions.images.processors import PictureProcessor
from posttrain.models.heads import picture_encoder
from tests.conftest import build_model
from tests.methods.helpers import losses
from tests.methods.test_vision_online import beginning, prompts
from tests.methods.test_vision_trainers import answer_logits, rows
from tests.vision_families import build
from tests.wordings import raises

BASE = {
    "max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True, "bf16": False, "optim": "sgd",
    "learning_rate": 0.1, "max_grad_norm": 0.0, "logging_steps": 1, "gradient_checkpointing": False, "beta": 0.5,
    "max_completion_length": 6, "max_length": None,
}  # fmt: skip


def teacher_of(name):
    """The family's model with other weights."""
    model, processor = build(name)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter) if parameter.dim() > 1 else 0.0)
    return model, processor


def make(folder, name, *, kind="Distillation", teacher=None, data=None, settings=None, **given):
    model, processor = build(name)
    teacher = teacher_of(name)[0] if teacher is None else teacher
    args = getattr(pt, kind + "Config")(str(folder), **(BASE | (settings or {})))
    data = rows("completion") if data is None else data
    return getattr(pt, kind + "Trainer")(model, teacher, args, train_dataset=data, processing_class=processor, **given)


def jsd(student, teacher, pairs, never):
    """Mean over answer tokens of the symmetric divergence; ids that stand for images or mark them are ``never`` drawn."""
    total, count = 0.0, 0
    for processor, example, answer in pairs:
        (x, tail), (y, _) = (answer_logits(m, processor, example, answer) for m in (student, teacher))
        kept = [i for i in range(x.shape[1]) if i not in never]
        q, p = (z[:, kept].double().softmax(-1) for z in (x, y))
        m = (p + q) / 2
        total = total + ((p * (p / m).log()).sum(-1) / 2 + (q * (q / m).log()).sum(-1) / 2).sum()
        count += len(tail)
    return total / count


def never_drawn(vision):
    """The placeholder, and every id that marks an image."""
    return {vision.reader.token_id, *vision.reader.controls.values()}


def undecoded(dataset):
    return dataset.cast_column("images", datasets.List(datasets.Image(decode=False)))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["Distillation", "GKD"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_step_on_the_dataset_is_the_divergence_of_each_sequence_alone(kind, name, tmp_path):
    trainer = make(tmp_path, name, kind=kind, settings={"lmbda": 0.0})
    (student, processor), (teacher, _) = build(name), teacher_of(name)
    pairs = [(processor, row, row["completion"]) for row in undecoded(rows("completion"))]
    loss = jsd(student, teacher, pairs, never_drawn(trainer.vision))
    loss.backward()
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-4)
    for (path, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        if ours.requires_grad:
            grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert torch.allclose(ours, theirs - 0.1 * grad, atol=1e-4), path


def test_prompts_of_dataset_answers_begin_as_those_that_are_sampled_from_do(tmp_path):
    model, processor = build("llava")
    processor = beginning(processor)
    args = pt.GKDConfig(str(tmp_path), **(BASE | {"lmbda": 0.5}))
    trainer = pt.GKDTrainer(
        model, teacher_of("llava")[0], args, train_dataset=rows("completion"), processing_class=processor
    )
    bos = processor.tokenizer.bos_token_id
    for row, prompt in zip(
        trainer.train_dataset, trainer.prompt_source.token_ids(list(trainer.train_dataset)), strict=True
    ):
        assert row["prompt_ids"] == list(prompt) and row["prompt_ids"].count(bos) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_on_policy_both_see_the_picture_of_what_was_sampled(name, engine, tmp_path):
    settings = {"num_generations": 2, "rollout_engine": engine}
    trainer = make(tmp_path, name, data=prompts(), settings=settings)
    seen, sample = [], trainer.sample
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.train()
    (student, processor), (teacher, _) = build(name), teacher_of(name)
    assert len(seen[0].rollouts) == 4
    pairs = []
    for rollout, example in zip(seen[0].rollouts, seen[0].examples, strict=True):
        assert len(rollout.pictures) == len(example["images"])
        row = {"images": example["images"], "prompt": example["prompt"]}
        pairs.append((processor, row, list(rollout.token_ids)))
    loss = jsd(student, teacher, pairs, never_drawn(trainer.vision))
    assert losses(trainer)[0] == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_iw_opd_weighs_early_tokens_more_under_the_pictures(engine, tmp_path):
    settings = {"num_generations": 2, "rollout_engine": engine, "beta": 1.0}
    trainer = make(tmp_path, "llava", kind="IWOPD", data=prompts(), settings=settings)
    seen, sample = [], trainer.sample
    trainer.sample = lambda *given: seen.append(sample(*given)) or seen[-1]
    trainer.train()
    (student, processor), (teacher, _) = build("llava"), teacher_of("llava")
    width = student.config.get_text_config().vocab_size
    kept = [i for i in range(width) if i not in never_drawn(trainer.vision)]
    total, count = 0.0, 0
    for rollout, example in zip(seen[0].rollouts, seen[0].examples, strict=True):
        places = torch.tensor([[kept.index(token)] for token in rollout.token_ids])
        q, p = (
            answer_logits(m, processor, example, list(rollout.token_ids))[0][:, kept].log_softmax(-1).gather(1, places)
            for m in (student, teacher)
        )
        a = (p - q).detach()[:, 0]
        weights = 1 + 0.5 * (1 - (a.abs().cumsum(0) - a.abs()) / a.abs().sum())
        total, count = total - (q[:, 0] * weights * a).sum(), count + len(a)
    (total / count).backward()
    assert losses(trainer)[0] == pytest.approx((total / count).item(), abs=1e-4)
    for (path, ours), theirs in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        if ours.requires_grad:
            grad = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert torch.allclose(ours, theirs - 0.1 * grad, atol=1e-4), path


def test_the_teacher_samples_under_the_picture_where_the_student_does_not(tmp_path):
    trainer = make(tmp_path, "llava", data=prompts(), settings={"lmbda": 0.0, "seq_kd": True})
    encoder = picture_encoder(trainer.teacher_model)
    encoder.encoded = 0
    trainer.train()
    assert encoder.encoded > 0 and losses(trainer)[0] > 0


def test_pixels_are_prepared_once_for_both(tmp_path, monkeypatch):
    trainer, seen = make(tmp_path, "llava", settings={"lmbda": 0.0, "preflight": "off"}), []
    prepare = PictureProcessor.prepare
    monkeypatch.setattr(PictureProcessor, "prepare", lambda self, one: seen.append(one.digest) or prepare(self, one))
    trainer.train()
    assert len(seen) == len(set(seen)) == 4


def normalized_otherwise(processor):
    """A processor of the same family whose pixels have another scale."""
    processor.image_processor.image_mean, processor.image_processor.image_std = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]
    return processor


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["processor", "object", "id"])
def test_a_teacher_that_normalizes_otherwise_sees_its_own_pixels(way, tmp_path):
    teacher, reads = teacher_of("llava")
    normalized_otherwise(reads)
    given, more = teacher, {"teacher_processing_class": reads}
    if way != "processor":
        teacher.save_pretrained(tmp_path / "teacher"), reads.save_pretrained(tmp_path / "teacher")
        given = str(tmp_path / "teacher")
        given, more = type(teacher).from_pretrained(given) if way == "object" else given, {}
    trainer = make(tmp_path, "llava", teacher=given, settings={"lmbda": 0.0}, **more)
    trainer.train()
    (student, processor), total, count = build("llava"), 0.0, 0
    kept = [i for i in range(320) if i not in never_drawn(trainer.vision)]
    for row in undecoded(rows("completion")):
        (x, tail), (y, _) = (
            answer_logits(m, p, row, row["completion"]) for m, p in ((student, processor), (teacher, reads))
        )
        q, p = (z[:, kept].double().softmax(-1) for z in (x, y))
        m = (p + q) / 2
        total = total + ((p * (p / m).log()).sum(-1) / 2 + (q * (q / m).log()).sum(-1) / 2).sum().item()
        count += len(tail)
    assert losses(trainer)[0] == pytest.approx(total / count, abs=1e-5)


def test_a_teacher_whose_pictures_have_other_tokens_is_refused(tmp_path):
    teacher, reads = build("qwen2_vl")
    reads.image_processor.size = {"shortest_edge": 4 * 14**2, "longest_edge": 8 * 14**2}
    with raises(ConfigError, "tokens"):
        make(tmp_path, "qwen2_vl", teacher=teacher, teacher_processing_class=reads)


def test_the_student_as_its_own_teacher_sees_the_pictures(tmp_path):
    model, processor = build("llava")
    args = pt.DistillationConfig(str(tmp_path), teacher_model_kind="base", lmbda=0.0, **BASE | {"max_steps": 2})
    trainer = pt.DistillationTrainer(model, None, args, train_dataset=rows("completion"), processing_class=processor)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(0.0, abs=1e-5)


def test_across_families_groups_of_bytes_are_compared_under_each_models_own_prompt(tmp_path):
    teacher, reads = teacher_of("qwen2_vl")
    settings = {"lmbda": 0.0, "use_uld_loss": True}
    trainer = make(tmp_path, "llava", kind="GOLD", teacher=teacher, settings=settings, teacher_processing_class=reads)
    trainer.train()
    (student, processor), (teacher, reads) = build("llava"), teacher_of("qwen2_vl")
    assert trainer.vision.reader.token_id != trainer.teacher_vision.reader.token_id
    never = [never_drawn(one) for one in (trainer.vision, trainer.teacher_vision)]
    total, count = 0.0, 0
    for row in undecoded(rows("completion")):
        (x, tail), (y, _) = (
            answer_logits(m, p, row, row["completion"]) for m, p in ((student, processor), (teacher, reads))
        )
        length = tail.index(processor.tokenizer.eos_token_id)  # One token a byte on both sides, until the turn ends.
        width = min(len(processor.tokenizer), x.shape[1])
        q, p = (
            z[:length, [i for i in range(width) if i not in ids]].softmax(-1).sort(-1, descending=True).values
            for z, ids in zip((x, y), never, strict=True)
        )
        total, count = total + (q - p).abs().sum().item(), count + length
    assert losses(trainer)[0] == pytest.approx(total / count, abs=1e-4)


def test_teachers_that_do_not_see_what_the_student_sees_are_refused(tmp_path):
    _, processor = build("llava")
    text = build_model(len(processor.tokenizer))
    with pytest.raises(ConfigError, match="images"):
        make(tmp_path, "llava", teacher=text)
    with pytest.raises(ConfigError, match="qwen2_vl"):
        make(tmp_path, "llava", teacher=build("qwen2_vl")[0])
    uld = {"kind": "GOLD", "settings": {"use_uld_loss": True, "lmbda": 0.0}}
    with pytest.raises(ConfigError, match="images"):
        make(tmp_path, "llava", teacher=text, teacher_processing_class=build("qwen2_vl")[1], **uld)
    with pytest.raises(DataError, match="reads only text"):
        make(tmp_path, "llava", teacher=build("qwen2_vl")[0], teacher_processing_class=processor.tokenizer, **uld)
    with pytest.raises(ConfigError, match="support text only"):
        make(tmp_path, "llava", settings={"teacher_model_server_url": "http://localhost:1", "beta": 0.0})
    with pytest.raises(DataError, match="truncation could split an image"):
        make(tmp_path, "llava", data=prompts(), settings={"max_prompt_length": 8}).train()


@pytest.mark.parametrize("kind", ["MiniLLM", "SDFT", "SDPO", "SSD"])
def test_methods_that_read_text_alone_refuse_columns_of_images(kind, tmp_path):
    model, processor = build("llava")
    args = getattr(pt, kind + "Config")(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    more = {"teacher_model": build("llava")[0]} if kind == "MiniLLM" else {}
    data = prompts().add_column("privileged_context", ["a"] * 4)
    more |= {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if kind == "SDPO" else {}
    with pytest.raises(DataError, match=r"train.*images"):
        getattr(pt, kind + "Trainer")(
            model, args=args, train_dataset=data, processing_class=processor.tokenizer, **more
        )


@pytest.mark.parametrize("kind", ["MiniLLM", "SDFT", "SDPO", "SSD"])
@pytest.mark.parametrize("setting", [{"image_fit": "drop"}, {"image_cache_gb": 2.0}, {"check_image_use": True}])
def test_methods_that_read_text_alone_refuse_settings_of_images(kind, setting, tmp_path, tiny_tokenizer):
    args = getattr(pt, kind + "Config")(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **setting)
    data = datasets.Dataset.from_list([{"prompt": "a", "privileged_context": "b"}] * 4)
    more = {"teacher_model": build_model(len(tiny_tokenizer), seed=1)} if kind == "MiniLLM" else {}
    more |= {"reward_funcs": lambda completions, **_: [0.0] * len(completions)} if kind == "SDPO" else {}
    student = build_model(len(tiny_tokenizer))
    with pytest.raises(ConfigError, match=next(iter(setting))):
        getattr(pt, kind + "Trainer")(student, args=args, train_dataset=data, processing_class=tiny_tokenizer, **more)
