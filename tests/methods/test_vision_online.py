"""GRPO, RLOO and online DPO on prompts with pictures: sampled and trained log-probs are those of each sequence alone."""

from __future__ import annotations

import io

import datasets
import pytest
import torch

from posttrain import (
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from posttrain.errors import ConfigError, DataError, ModelError
from posttrain.extensions.images.rows import exchanged
from posttrain.loop.rollout import rollout_step, sample, settings_of
from posttrain.loop.scoring import completion_rows
from posttrain.models.forward import sequence_logps
from posttrain.models.heads import picture_encoder
from posttrain.types import Row
from tests.methods.test_vision_trainers import png, torn, user
from tests.vision_families import build, noise

QUICK = {
    "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "report_to": "none",
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no",
    "learning_rate": 1e-3,
}  # fmt: skip
METHODS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}


def prompts(pictures=((84, 56, 1), None, (56, 112, 2), (84, 56, 3)), text="which?"):
    """One question about different pictures; None is a prompt without any."""
    found = [
        {"prompt": user(text, int(held is not None)), "images": [] if held is None else [png(noise(*held))]}
        for held in pictures
    ]
    return datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))


def short(completions, **_):
    return [-float(len(str(one))) for one in completions]


def trainer_of(kind, tmp_path, name="llava", dataset=None, reward=short, **options):
    model, processor = build(name)
    config, trainer = METHODS[kind]
    args = config(str(tmp_path), **QUICK | options)
    dataset = prompts() if dataset is None else dataset
    return trainer(model, reward, args, train_dataset=dataset, processing_class=processor)


def gaps(trainer, generation):
    """How far what the engine says of each completion is from a plain forward of that row alone."""
    rows = [
        Row(
            r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)], pictures=[list(r.pictures), []] if r.pictures else []
        )
        for r in generation.rollouts
    ]
    trainer.model.eval()
    truth = sequence_logps(trainer.model, rows)
    return max(float((t - torch.tensor(r.logp)).abs().max()) for t, r in zip(truth, generation.rollouts, strict=True))


def generate(trainer, rows=(0, 1, 2, 3), size=2):
    examples = [dict(trainer.train_dataset[i]) for i in rows for _ in range(size)]
    return sample(trainer.run, examples, "train")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "native") for name in ("qwen2_vl", "smolvlm", "idefics3", "gemma3", "llava")),
        ("qwen2_vl", "hf"),
        ("gemma3", "hf"),
        ("mllama", "hf"),
        ("glm4v", "native"),
        ("glm4v", "hf"),
        ("deepseek_vl", "native"),
        ("ovis2", "hf"),
    ],
)
def test_sampled_and_trained_log_probs_are_those_of_each_row_alone(kind, name, engine, tmp_path):
    trainer = trainer_of(
        kind, tmp_path, name, rollout_engine=engine, steps_per_generation=2, gradient_accumulation_steps=1, beta=0.1,
        per_device_train_batch_size=4, num_generations=2,
    )  # fmt: skip
    seen = []
    original = trainer.advantages

    def attach(generation, rewards, logps):
        rows = generation.every_row()
        truth = [one for row in rows for one in sequence_logps(trainer.model.eval(), [row])]
        for column in {"old_logp", "ref_logp"} & logps.keys():
            found = zip(truth, logps[column], strict=True)
            seen.append(max(float((t - torch.tensor(f)).abs().max()) for t, f in found))
        seen.append(gaps(trainer, generation))
        return original(generation, rewards, logps)

    trainer.advantages = attach
    trainer.resolve()
    # The reference is the policy: nothing has moved.
    rollout_step(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4) for _ in range(2)], "train")
    assert len(seen) >= 2 and max(seen) < 1e-4
    trainer.advantages = original
    trainer.train()
    assert all(row["images/seconds"] > 0 for row in trainer.state.log_history if "images/encoded" in row)


def beginning(processor):
    """A tokenizer that begins texts with bos, as LLaVA-1.5's does, beside a template that writes none."""
    from tokenizers.processors import TemplateProcessing

    bos = processor.tokenizer.bos_token
    made = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, processor.tokenizer.bos_token_id)])
    processor.tokenizer.backend_tokenizer.post_processor = made
    return processor


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_prompts_begin_with_bos_where_the_processor_itself_begins_them(name, tmp_path):
    """`apply_chat_template(tokenize=True)` of a processor adds what its tokenizer adds, unless the template wrote it."""
    model, processor = build(name)
    processor = beginning(processor)
    config, trainer = METHODS["grpo"]
    dataset = prompts(((84, 56, 1), (56, 112, 2)))
    trainer = trainer(model, short, config(str(tmp_path), **QUICK), train_dataset=dataset, processing_class=processor)
    for row in dataset:
        (ids,) = trainer.prompt_source.token_ids([row])
        filled = [{"type": "image", "image": row["images"][0]}, {"type": "text", "text": "which?"}]
        truth = processor.apply_chat_template(
            [{"role": "user", "content": filled}], tokenize=True, add_generation_prompt=True, return_dict=True
        )
        assert list(ids) == list(truth["input_ids"][0])
        assert ids.count(processor.tokenizer.bos_token_id) == 1
    trainer.train()


def test_two_prompts_that_differ_in_their_picture_alone_share_nothing(tmp_path):
    trainer = trainer_of("grpo", tmp_path, dataset=prompts([(84, 56, 1), (84, 56, 2), (84, 56, 1)]))
    generation = generate(trainer, (0, 1, 2))
    assert generation.rollouts[0].prompt_ids == generation.rollouts[2].prompt_ids
    assert [len(group) for group in generation.groups()] == [2, 2, 2]
    rows = generation.every_row()
    assert [row.pictures[0][0].picture for row in rows] == [r.pictures[0].picture for r in generation.rollouts[::2]]
    assert gaps(trainer, generation) < 1e-4


def test_a_group_encodes_its_picture_once_in_sampling_and_once_in_the_update(tmp_path):
    trainer = trainer_of("grpo", tmp_path, dataset=prompts([(84, 56, 1), (84, 56, 2)]), max_steps=1, preflight="off")
    encoder = picture_encoder(trainer.model)
    encoder.encoded = 0
    trainer.train()
    assert encoder.encoded == 4
    frozen = trainer_of(
        "grpo",
        tmp_path / "b",
        dataset=prompts([(84, 56, 1), (84, 56, 2)]),
        freeze_vision=True,
        max_steps=3,
        beta=0.1,
        preflight="off",
    )
    encoder = picture_encoder(frozen.model)
    encoder.encoded = 0
    frozen.train()
    assert encoder.encoded == 2


def test_rewards_see_opened_pictures_that_a_group_shares(tmp_path):
    seen = []

    def look(prompts, completions, images, **_):
        seen.append((prompts, images))
        return [float(len(held)) for held in images]

    trainer = trainer_of("grpo", tmp_path, reward=look, max_steps=1, per_device_train_batch_size=16)
    trainer.train()
    shown, images = seen[-1]
    assert sorted({len(held) for held in images}) == [0, 1]
    for i in range(0, 16, 4):
        if not images[i]:
            continue
        assert images[i][0] is images[i + 1][0] and images[i][0].size in {(84, 56), (56, 112)}
        (block,) = [b for b in shown[i][0]["content"] if b["type"] == "image"]
        assert block["image"] is images[i][0]


def test_a_placeholder_is_never_drawn_however_likely(tmp_path):
    trainer = trainer_of("grpo", tmp_path)
    token = picture_encoder(trainer.model).processor.token_id
    with torch.no_grad():
        trainer.model.lm_head.weight[token] = trainer.model.lm_head.weight.abs().sum(0)
        trainer.model.lm_head.weight *= 0.1
    generation = generate(trainer)
    assert all(token not in r.token_ids for r in generation.rollouts)
    assert token in dict(settings_of(trainer.run, "train").sampling.logit_bias)


def test_a_placeholder_that_an_engine_draws_is_masked_and_counted(tmp_path):
    trainer = trainer_of("grpo", tmp_path)
    token = picture_encoder(trainer.model).processor.token_id
    ask = trainer.weight_sync.ask

    def drawing(batches):
        found = ask(batches)
        found[0][0].token_ids[0] = token
        return found

    trainer.weight_sync.ask = drawing
    generation = generate(trainer)
    assert generation.left_out == {0} and token not in generation.rollouts[0].token_ids
    assert trainer.buffers["train"].compute(None)["images/sampled_placeholders"] == 1


def test_a_checkpoint_keeps_the_pictures_of_rollouts_that_wait(tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    whole = trainer_of("grpo", tmp_path / "a", **options, max_steps=3)
    whole.train()
    first = trainer_of("grpo", tmp_path / "b", **options, max_steps=3)
    first.train()
    again = trainer_of("grpo", tmp_path / "b", **options, max_steps=3)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))
    for (name, a), b in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_images_above_the_limit_are_made_smaller_counted_and_trained_as_they_were_sampled(tmp_path):
    trainer = trainer_of("grpo", tmp_path, "qwen2_vl", image_max_tokens=4, image_fit="resize", save_strategy="steps")
    generation = generate(trainer)
    assert {one.count for r in generation.rollouts for one in r.pictures} == {3, 4}
    assert gaps(trainer, generation) < 1e-4
    trainer.train()
    assert sum(log.get("images/resized", 0) for log in trainer.state.log_history) > 0


def test_images_above_the_limit_are_refused_by_row_before_the_model_is_loaded(tmp_path):
    with pytest.raises(DataError, match=r"train_dataset row 0: PT-G001|row 0: PT-G001"):
        trainer_of("grpo", tmp_path, "qwen2_vl", image_max_tokens=4)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_typed_placeholder_stays_text_and_is_counted(tmp_path):
    dataset = datasets.concatenate_datasets([prompts(), prompts([(84, 56, 9)], text="an <image> here?")])
    trainer = trainer_of("grpo", tmp_path, dataset=dataset, logging_steps=1)
    (prompt,) = trainer.vision.prompts([dict(trainer.train_dataset[4])])
    assert prompt.count(trainer.vision.reader.token_id) == prompt.pictures[0].count
    assert "an <image> here?" in trainer.processing_class.decode(prompt)
    # The first generation tells what was read before it, too.
    counts = [(generate(trainer, (4,)), trainer.buffers["train"].compute(None))[1] for _ in range(2)]
    assert counts[1]["images/escaped_strings"] == 1


def test_a_typed_placeholder_that_cannot_stay_text_is_refused_by_row(tmp_path, monkeypatch):
    from posttrain.extensions.images.processors import PictureProcessor

    monkeypatch.setattr(PictureProcessor, "escapes", False)
    dataset = datasets.concatenate_datasets([prompts(), prompts([(84, 56, 9)], text="an <image> here?")])
    with pytest.raises(DataError, match="row 4: PT-G008"):
        trainer_of("grpo", tmp_path, dataset=dataset)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"bytes": None, "path": "https://example.com/cat.png"}, "remote"),
        ({"bytes": b"no image at all", "path": None}, "not a readable image"),
        ({"bytes": None, "path": "missing.png"}, "not a readable image"),
    ],
)
def test_a_picture_that_cannot_be_read_is_refused_by_row_before_the_model_is_loaded(held, said, tmp_path):
    rows = [{"prompt": user(f"{i}?", 1), "images": [held if i == 1 else png(noise(84, 56))]} for i in range(4)]
    dataset = datasets.Dataset.from_list(rows)
    dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(DataError, match=f"row 1: column 'images'.*{said}"):
        trainer_of("grpo", tmp_path, dataset=dataset)


def test_text_prompts_with_images_are_refused(tmp_path):
    dataset = datasets.Dataset.from_list([{"prompt": "<image> what?", "images": [png(noise(84, 56))]}] * 4)
    with pytest.raises(DataError, match="conversation"):
        trainer_of("grpo", tmp_path, dataset=dataset)


@pytest.mark.parametrize("engine", ["paged"])
def test_an_engine_that_reads_no_images_is_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match="images"):
        trainer_of("grpo", tmp_path, rollout_engine=engine)


def test_tools_with_images_are_refused(tmp_path):
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    model, processor = build("llava")
    with pytest.raises(DataError, match="images"):
        GRPOTrainer(
            model, short, GRPOConfig(str(tmp_path), **QUICK), train_dataset=prompts(), processing_class=processor.tokenizer,
            tools=[add],
        )  # fmt: skip


def test_more_images_than_a_row_may_have_are_refused(tmp_path):
    with pytest.raises(DataError, match="max_images_per_row=0"):
        trainer_of("grpo", tmp_path, max_images_per_row=0)


# Checks and reports --------------------------------------------------------------------------------------------------


def test_rollouts_under_another_rows_picture_stop_the_run(tmp_path):
    trainer = trainer_of("grpo", tmp_path, dataset=prompts([(84, 56, 1), (84, 56, 2)]))
    read = trainer.prompt_source.tokenized
    trainer.prompt_source.tokenized = lambda examples: read(examples)[::-1]
    with pytest.raises(ModelError, match="PT-G015"):
        generate(trainer, (0, 1))


def test_evaluation_under_exchanged_pictures_tells_a_reward_that_needs_none(tmp_path):
    trainer = trainer_of(
        "grpo", tmp_path, reward=lambda completions, **_: [1.0] * len(completions), check_image_use=True
    )
    metrics = trainer.evaluate(prompts([(84, 56, i) for i in range(4)]))
    assert metrics["eval_images/exchanged_reward"] == 1
    assert "PT-G017" in {found.code for found in trainer.preflight.reported}


def test_a_file_that_was_cut_is_named_by_its_row_before_the_model_is_loaded(tmp_path):
    held = [torn()]
    rows = [{"prompt": user(f"{i}?", 1), "images": held if i == 1 else [png(noise(84, 56))]} for i in range(4)]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    with pytest.raises(DataError, match=r"row 1: .*PT-G003"):
        trainer_of("grpo", tmp_path, dataset=dataset)


def test_exchanged_examples_show_another_rows_pictures_and_ask_the_same(tmp_path):
    trainer = trainer_of("grpo", tmp_path, check_image_use=True)
    examples = [dict(trainer.train_dataset[i]) for i in (0, 1, 2, 3) for _ in range(2)]
    own, other = trainer.vision.prompts(examples), trainer.vision.prompts(exchanged(examples, 2))
    assert own[2] == other[2] and own[2].pictures == ()
    for i in (0, 4, 6):
        assert own[i].pictures[0].picture != other[i].pictures[0].picture and other[i] == other[i + 1]


def test_the_table_of_completions_shows_labels_in_place_of_placeholders(tmp_path):
    trainer = trainer_of("grpo", tmp_path)
    generation = generate(trainer)
    table = trainer.score(generation, "train")
    generation.columns["advantages"] = [0.0] * 8
    rows = completion_rows(generation, table, trainer.processing_class, 0)
    assert "[image 1: 84×56, 4 tokens, " in rows[0]["prompt"] and "<image>" not in rows[0]["prompt"]
    assert rows[0]["image_sizes"] == [[84, 56]] and rows[2]["image_digests"] == []
    assert [len(row.get("thumbnails", ())) for row in rows] == [len(row["image_digests"]) for row in rows]
    plain = completion_rows(generation, table, trainer.processing_class, 0, images=False)
    assert not any("thumbnails" in row for row in plain)


def test_the_page_of_a_run_shows_thumbnails_beside_its_completions(tmp_path):
    from posttrain.extensions.page.build import render
    from posttrain.extensions.page.run import read_run

    trainer = trainer_of("grpo", tmp_path, max_steps=1, log_completions=True)
    trainer.train()
    page = render([read_run(tmp_path)])
    assert 'alt="image 1: 84×56, ' in page and page.count("<image>") == page.count("&lt;image&gt;") == 0


def test_a_reward_model_that_reads_text_alone_is_refused(tmp_path):
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    config = LlamaConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_labels, config.pad_token_id = 1, 256
    model, processor = build("llava")
    with pytest.raises(ConfigError, match="reads only text"):
        GRPOTrainer(
            model, AutoModelForSequenceClassification.from_config(config), GRPOConfig(str(tmp_path), **QUICK, check_rewards=False),
            train_dataset=prompts(), processing_class=processor, reward_processing_classes=processor.tokenizer,
        )  # fmt: skip


# Online DPO ----------------------------------------------------------------------------------------------------------


def online_dpo(tmp_path, name="llava", **options):
    model, processor = build(name)
    settings = {k: v for k, v in QUICK.items() if k not in ("num_generations", "max_completion_length")}
    own = {"learning_rate": 0.0, "max_new_tokens": 6, "max_length": 512}
    args = OnlineDPOConfig(str(tmp_path), **settings | own | options)
    return OnlineDPOTrainer(model, reward_funcs=short, args=args, train_dataset=prompts(), processing_class=processor)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_online_dpo_compares_completions_of_mixed_prompts_under_their_own_pictures(name, tmp_path):
    trainer = online_dpo(tmp_path, name, per_device_train_batch_size=4)
    seen = []
    original = trainer.advantages

    def attach(generation, rewards, logps):
        truth = [one for row in generation.every_row() for one in sequence_logps(trainer.model.eval(), [row])]
        found = zip(truth, logps["ref_logp"], strict=True)
        seen.append(max(float((t - torch.tensor(f)).abs().max()) for t, f in found))
        return original(generation, rewards, logps)

    trainer.advantages = attach
    trainer.train()
    assert seen and max(seen) < 1e-4


def test_online_dpo_cuts_no_prompt_with_images(tmp_path):
    with pytest.raises(DataError, match="max_length"):
        online_dpo(tmp_path, max_length=12, per_device_train_batch_size=4).train()


def test_a_generation_of_64_large_pictures_waits_as_their_files(tmp_path):
    import pickle

    buffer = io.BytesIO()
    noise(64, 48).resize((1024, 768)).save(buffer, "JPEG", quality=90)
    # As large as a photo of this size: what stands behind a JPEG's end is not read.
    files = [buffer.getvalue() + bytes(160_000) + bytes([i]) for i in range(64)]
    rows = [{"prompt": user(f"{i}?", 1), "images": [{"bytes": one, "path": None}]} for i, one in enumerate(files)]
    dataset = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    trainer = trainer_of("grpo", tmp_path, dataset=dataset, preflight="off")
    examples = [dict(trainer.train_dataset[i]) for i in range(64) for _ in range(2)]
    generation = sample(trainer.run, examples, "train")
    held = {one.picture.digest: one.picture for rollout in generation.rollouts for one in rollout.pictures}
    assert len(held) == 64 and all(isinstance(one.source, bytes) for one in held.values())
    assert len(pickle.dumps((generation.rollouts, generation.rows(range(128), skip_truncated=False)))) < 64 * 0.3e6


# Asynchronous --------------------------------------------------------------------------------------------------------

# One step is 4 prompts x 4 completions. Adam makes whole steps of rounding errors.
SAME = {"per_device_train_batch_size": 16, "optim": "sgd", "max_steps": 3, "lr_scheduler_type": "constant"}


def asynchronous(tmp_path, make=None, name="llava", **options):
    """With a worker that hands over what ``make`` gives, or with a process of its own."""
    from posttrain import AsyncGRPOConfig, AsyncGRPOTrainer
    from tests.extensions.asynchronous.helpers import StubTransfer, StubWorker

    model, processor = build(name)
    given = {} if make is None else {"rollout_worker": StubWorker(make), "weight_transfer": StubTransfer()}
    given |= {key: options.pop(key) for key in ("tools", "train_dataset", "reward_funcs") if key in options}
    args = AsyncGRPOConfig(str(tmp_path), **QUICK | {"worker_threads": 1} | options)
    about = {"reward_funcs": short, "train_dataset": prompts(), "processing_class": processor} | given
    return AsyncGRPOTrainer(model, args=args, **about)


def test_asynchronous_updates_on_equal_rollouts_are_synchronous_grpo_s(tmp_path):
    from posttrain.extensions.asynchronous.jobs import score_group
    from posttrain.rewards.runner import RewardRunner
    from tests.extensions.asynchronous.helpers import steps, within_groups
    from tests.extensions.asynchronous.test_async_against_sync import recorded

    sync = trainer_of("grpo", tmp_path / "a", **SAME)
    groups = recorded(sync)
    sync.train()
    how = {
        "method": within_groups("group"),
        "mask_truncated": False,
        "truncation": sync.run.online.sampling(sync.run).left_out,
    }
    scored = [one for group in groups for one in score_group(group, RewardRunner(short), sync.processing_class, **how)]
    # What goes through a queue is bytes and text; no decoded picture is among it.
    assert "PngImageFile" not in repr(scored[0].samples[0].prompt)

    def make(number, version):
        (scored[number].samples[0]).model_version = version
        return scored[number]

    run = asynchronous(tmp_path / "b", make, scale_rewards="group", **SAME)
    run.train()
    for name in ("loss", "grad_norm", "reward", "entropy"):
        theirs = [row[name] for row in steps(sync)]
        assert [row[name] for row in steps(run)] == pytest.approx(theirs, rel=1e-4, abs=1e-6), name
    for (name, own), other in zip(run.model.named_parameters(), sync.model.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-6), name


def seen_width(completions, images, **_):
    """The width of the row's picture, and a little for the answer."""
    return [(held[0].size[0] if held else 0) + 0.001 * len(str(c)) for held, c in zip(images, completions, strict=True)]


@pytest.mark.usefixtures("forked_workers")
def test_a_worker_process_samples_under_the_pictures_of_its_prompts(tmp_path):
    from tests.extensions.asynchronous.helpers import steps

    how = {"max_staleness": 0, "max_steps": 2, "per_device_train_batch_size": 16, "max_inflight_tasks": 16}
    run = asynchronous(tmp_path, name="qwen2_vl", reward_funcs=seen_width, **how)
    add, table = run.record.add_completions, []
    run.source.add_completions = lambda rows: (table.extend(rows), add(rows))
    run.train()
    for row in steps(run):
        # Another picture, or none, would move the log-probs of the worker away from those of the trainer.
        assert row["ratio/max"] == pytest.approx(1.0, abs=2e-3) and row["kl"] == pytest.approx(0.0, abs=1e-5)
    widths = [row["image_sizes"][0][0] if row["image_sizes"] else 0 for row in table]
    assert [round(row["seen_width"]) for row in table] == widths and {56, 84} <= set(widths)


def look():
    """Look."""
    return ""


def test_tools_beside_prompts_with_pictures_are_refused_in_asynchronous_training(tmp_path):
    with pytest.raises(DataError, match="images"):
        asynchronous(tmp_path, tools=[look])
