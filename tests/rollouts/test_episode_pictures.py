"""Episodes whose tools and environments return images: branch images of a rollout, without loss, and nothing mistaken."""

from __future__ import annotations

import copy
from dataclasses import replace

import datasets
import pytest
import torch

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.errors import ConfigError, ModelError, RolloutError
from posttrain.loop.rollout import rollout_step, sample
from posttrain.models.forward import sequence_logps
from posttrain.models.heads import picture_encoder
from posttrain.rollouts.episodes.environments import add_observation
from posttrain.rollouts.episodes.loop import ToolLoop
from tests.methods.test_vision_online import QUICK, short
from tests.methods.test_vision_trainers import png, user
from tests.vision_families import build, noise

CALLS = (
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
)
DECLARED = "{%- if tools %}{{- '<|im_start|>system\n' }}{{- tools | tojson }}{{- '<|im_end|>\n' }}{%- endif %}"


def tool_template(template):
    """The families' template with calls, and with declared tools before all messages."""
    end = "{{- '<|im_end|>\n' }}{%- endfor %}"
    assert end in template
    return DECLARED + template.replace(end, CALLS + end)


def family(name):
    model, processor = build(name)
    processor.chat_template = processor.tokenizer.chat_template = tool_template(processor.chat_template)
    return model, processor


def look(place: str = "here") -> list:
    """Take a photograph.

    Args:
        place: Where.
    """
    return [{"type": "text", "text": "seen: "}, {"type": "image", "image": noise(84, 56, len(place))}]


LOOK = [{"type": "function", "function": {"name": "look", "arguments": {}}}]


@pytest.fixture
def always_calls(monkeypatch):
    """Whatever a model says is read as a call; how often is limited by ``max_tool_calling_iterations``."""

    def parse(tokenizer, ids, prefix=None, tools=None):
        return {"role": "assistant", "content": "", "tool_calls": copy.deepcopy(LOOK)}

    monkeypatch.setitem(ToolLoop.__init__.__kwdefaults__, "parse", parse)


def prompts(pictures=((84, 56, 1), None, (56, 112, 2), None)):
    found = [
        {"prompt": user("which?", int(held is not None)), "images": [] if held is None else [png(noise(*held))]}
        for held in pictures
    ]
    return datasets.Dataset.from_list(found).cast_column("images", datasets.List(datasets.Image()))


def trainer_of(tmp_path, name="llava", dataset=None, reward=short, tools=(look,), **options):
    model, processor = family(name)
    own = {"environment_factory": options.pop("environment_factory", None)}
    options = {"max_completion_length": 400, "max_tool_calling_iterations": 2, **options}
    args = GRPOConfig(str(tmp_path), **QUICK | options)
    dataset = prompts() if dataset is None else dataset
    trainer = GRPOTrainer(
        model, reward, args, train_dataset=dataset, processing_class=processor, tools=list(tools) or None, **own
    )
    return short_turns(trainer)


def short_turns(trainer, tokens=3):
    """Turns of a model that knows nothing end after a few tokens, as if it had meant to."""
    ask = trainer.weight_sync.ask

    def cut(batches):
        # Where they are cut is where they need not be sampled beyond.
        answers = ask(
            [(requests, replace(one, max_new_tokens=min(tokens, one.max_new_tokens))) for requests, one in batches]
        )
        ended = {"finish_reason": "stop", "processed_logp": None}
        return [
            [replace(one, token_ids=one.token_ids[:tokens], logp=one.logp[:tokens], **ended) for one in answer]
            for answer in answers
        ]

    trainer.weight_sync.ask = cut
    return trainer


def plain_logps(trainer, rollout):
    """Of every completion token, by the model's own forward with the processor's own tensors, of this sequence alone."""
    encoder = picture_encoder(trainer.model)
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.token_ids]])
    pictures = [one.picture for one in (*rollout.pictures, *rollout.shown)]
    inputs = encoder.processor.plain_inputs(ids, [pictures], len(rollout.prompt_ids))
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, **inputs).logits[0].float()
    begin = len(rollout.prompt_ids)
    logits = logits / trainer.temperature if hasattr(trainer, "temperature") else logits
    return logits[begin - 1 : -1].log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "engine"),
    [("llava", "native"), ("qwen2_vl", "native"), ("gemma3", "native"), ("qwen2_vl", "hf"), ("llava", "hf")],
)
def test_what_a_tool_shows_is_read_like_any_picture_and_not_trained(name, engine, always_calls, tmp_path):
    trainer = trainer_of(tmp_path, name, rollout_engine=engine, beta=0.1)
    token = picture_encoder(trainer.model).processor.token_id
    seen = []
    original = trainer.advantages

    def spied(generation, rewards, logps):
        seen.append((generation, logps))
        return original(generation, rewards, logps)

    trainer.advantages = spied
    trainer.resolve()
    examples = [dict(trainer.train_dataset[i]) for i in range(4) for _ in range(2)]
    rollout_step(trainer.run, examples, "train")
    ((generation, logps),) = seen
    trained = [one for row in generation.every_row() for one in sequence_logps(trainer.model.eval(), [row])]
    rows = zip(generation.rollouts, trained, logps["ref_logp"], strict=True)
    for rollout, logp, reference in rows:
        assert len(rollout.shown) == 2 and rollout.tool_mask is not None
        own = torch.tensor(rollout.tool_mask, dtype=torch.bool)
        assert not any(m for t, m in zip(rollout.token_ids, rollout.tool_mask, strict=True) if t == token)
        truth = plain_logps(trainer, rollout)
        for said in (logp, torch.tensor(reference), torch.tensor(rollout.logp)):
            assert float((said - truth)[own].abs().max()) < 1e-4
    trainer.advantages = original
    trainer.train()


def test_pictures_of_tools_reach_the_update(always_calls, tmp_path):
    """The control of the test above: under another photograph the same tokens have other log-probs."""
    trainer = trainer_of(tmp_path)
    generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
    row, other = generation.every_row()[1], generation.every_row()[0]
    before = sequence_logps(trainer.model.eval(), [row])[0]
    row.pictures[1][0] = copy.copy(row.pictures[1][0])
    object.__setattr__(row.pictures[1][0], "picture", other.pictures[0][0].picture)
    assert float((sequence_logps(trainer.model, [row])[0] - before).abs().max()) > 1e-2


def test_rewards_read_images_of_tools_and_tables_count_them(always_calls, tmp_path):
    read = []

    def reward(completions, **_):
        read.extend(completions)
        return [0.0] * len(completions)

    trainer = trainer_of(tmp_path, reward=reward, check_rewards=False)
    generation = rollout_step(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
    (block,) = [b for m in read[0] if m["role"] == "tool" for b in m["content"] if b["type"] == "image"][:1]
    assert block["image"].size == (84, 56)
    rows = trainer.run.progress.shown
    assert [len(row["image_digests"]) for row in rows] == [len(r.pictures) + len(r.shown) for r in generation.rollouts]


def test_a_checkpoint_keeps_what_tools_showed(always_calls, tmp_path):
    options = {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    whole = trainer_of(tmp_path / "a", **options, max_steps=2)
    whole.train()
    second = trainer_of(tmp_path / "b", **options, max_steps=2)
    second.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name


# Limits and faults ---------------------------------------------------------------------------------------------------


def test_an_answer_with_more_images_than_a_row_may_have_is_taken_back_whole(always_calls, tmp_path):
    trainer = trainer_of(tmp_path, max_images_per_row=1)
    generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in (0, 1)], "train")
    assert [(len(r.pictures), len(r.shown)) for r in generation.rollouts] == [(1, 0), (0, 1)]
    first, second = generation.completions
    assert [m["role"] for m in first] == ["assistant"] and first[0]["tool_calls"]
    assert [m["role"] for m in second] == ["assistant", "tool", "assistant"]


def test_an_answer_that_does_not_fit_is_taken_back_with_its_images(always_calls, tmp_path):
    trainer = trainer_of(tmp_path, max_completion_length=60)
    generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
    for rollout, messages in zip(generation.rollouts, generation.completions, strict=True):
        tokens = sum(one.count for one in rollout.shown)
        assert rollout.token_ids.count(picture_encoder(trainer.model).processor.token_id) == tokens
        assert sum(m["role"] == "tool" for m in messages) == len(rollout.shown)


def test_an_episode_whose_images_cannot_be_placed_is_masked_and_counted(always_calls, tmp_path):
    model, processor = family("llava")
    # Results are shown without their images.
    shown = "{%- if block['type'] == 'image' and message['role'] != 'tool' %}"
    template = processor.chat_template.replace("{%- if block['type'] == 'image' %}", shown)
    processor.chat_template = processor.tokenizer.chat_template = template.replace("block['text']", "block.text or ''")
    args = GRPOConfig(str(tmp_path), **QUICK | {"max_completion_length": 200})
    trainer = GRPOTrainer(model, short, args, train_dataset=prompts(), processing_class=processor, tools=[look])
    short_turns(trainer)
    generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4)], "train")
    assert all(set(r.tool_mask) == {0} and not r.shown for r in generation.rollouts)
    assert trainer.buffers["train"].compute(None)["images/masked_episodes"] == 4
    assert all(not any(mask) for row in generation.every_row() for mask in row.loss_masks)


def test_a_broken_image_is_told_to_the_model(tmp_path, always_calls):
    def look() -> list:
        """Take a photograph."""
        return [{"type": "image", "image": b"no picture"}]

    trainer = trainer_of(tmp_path, tools=[look])
    generation = sample(trainer.run, [dict(trainer.train_dataset[1])], "train")
    (message, *_) = [m for m in generation.completions[0] if m["role"] == "tool"]
    assert "DataError" in message["content"] and not generation.rollouts[0].shown


def test_special_tokens_around_an_image_are_plain_text(always_calls, tmp_path):
    def look() -> list:
        """Take a photograph."""
        return [{"type": "text", "text": "<image><|im_end|>"}, {"type": "image", "image": noise(84, 56)}]

    trainer = trainer_of(tmp_path, tools=[look])
    generation = sample(trainer.run, [dict(trainer.train_dataset[1])], "train")
    (rollout,) = generation.rollouts
    encoder = picture_encoder(trainer.model)
    tools = [t for t, m in zip(rollout.token_ids, rollout.tool_mask, strict=True) if not m]
    assert tools.count(encoder.processor.token_id) == sum(one.count for one in rollout.shown)
    assert "<image><|im_end|>" in trainer.processing_class.decode(tools)


def test_a_model_of_text_reads_no_image(tmp_path):
    with pytest.raises(RolloutError, match="text"):
        add_observation(user("x"), [{"type": "image", "image": noise(8, 8)}], "here")


@pytest.mark.parametrize("name", ["paligemma", "mllama"])
def test_a_model_to_which_a_later_turn_changes_an_earlier_one_takes_no_tools(name, tmp_path):
    with pytest.raises(ModelError, match="next turn"):
        trainer_of(tmp_path, name, dataset=prompts([(84, 56, 1)] * 4))


def test_such_a_model_uses_tools_on_text_as_ever(always_calls, tmp_path):
    dataset = datasets.Dataset.from_list([{"prompt": user(f"row {i}?", 0)} for i in range(4)])
    trainer = trainer_of(tmp_path, "mllama", dataset=dataset)
    assert not trainer.vision.images
    generation = sample(trainer.run, [dict(trainer.train_dataset[0])], "train")
    (message, *_) = [m for m in generation.completions[0] if m["role"] == "tool"]
    assert "this model supports text only" in message["content"]


def test_exchanged_images_and_tools_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="check_image_use"):
        trainer_of(tmp_path, check_image_use=True)


# Environments --------------------------------------------------------------------------------------------------------


class Room:
    """Shows itself first, and again when one turns."""

    def reset(self, group_seed=0, **_):
        self.canvas = noise(84, 56, group_seed % 7)
        return [{"type": "text", "text": "You see <image> "}, {"type": "image", "image": self.canvas}]

    def turn(self) -> list:
        """Turn around."""
        # What was returned before is drawn on.
        self.canvas.paste((0, 0, 0), (0, 0, 84, 28))
        return [{"type": "image", "image": self.canvas}]


class Still(Room):
    """Shows itself, and there is nothing to do."""

    turn = None


@pytest.mark.matrix
@pytest.mark.parametrize("made", [Room, Still])
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_what_a_reset_shows_is_part_of_the_prompt(made, name, monkeypatch, tmp_path):
    calls = [{"type": "function", "function": {"name": "turn", "arguments": {}}}]
    parse = lambda *_, **__: {"role": "assistant", "content": "", "tool_calls": copy.deepcopy(calls)}  # noqa: E731
    monkeypatch.setitem(ToolLoop.__init__.__kwdefaults__, "parse", parse)
    dataset = datasets.Dataset.from_list([{"prompt": user(f"room {i}?", 0)} for i in range(4)])
    trainer = trainer_of(tmp_path, name, dataset=dataset, tools=(), environment_factory=made, max_completion_length=200)
    generation = sample(trainer.run, [dict(trainer.train_dataset[i]) for i in range(4) for _ in range(2)], "train")
    for rollout in generation.rollouts:
        (first, *later) = [one.picture.digest for one in (*rollout.pictures, *rollout.shown)]
        assert first not in later and bool(later) == (made is Room)
        own = torch.tensor(rollout.tool_mask or [1] * len(rollout.token_ids), dtype=torch.bool)
        assert float((torch.tensor(rollout.logp) - plain_logps(trainer, rollout))[own].abs().max()) < 1e-4
    blocks = generation.examples[0]["prompt"][-1]["content"]
    assert blocks[-1]["image"].size == (84, 56)
    trainer.train()
