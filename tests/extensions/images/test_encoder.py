"""Pictures in a token forest: what a tree gives is what the model's own forward gives for each sequence alone."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from types import SimpleNamespace

import peft
import pytest
import torch

from posttrain.data.forest import Layout, collate, halves, share_prompts, split_by_sequence, to_rows
from posttrain.errors import ModelError
from posttrain.extensions.images.encoder import (
    grid_positions,
    install_pictures,
    refuse_skipped_layers,
    tower_parameters,
)
from posttrain.extensions.images.picture import read_picture
from posttrain.models.forward import forward
from posttrain.models.probe import probe_layout
from posttrain.types import Row
from tests.vision_families import NAMES, build, noise
from tests.wordings import raises

TREE = Layout("tree", row_tokens=4096)
SHORT = Layout("tree", row_tokens=100)
PADDED = Layout("padded", row_tokens=4096)
SIZES = ((84, 56), (56, 112), (112, 70), (70, 70))


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    model, processor = build(request.param)
    return request.param, model, processor, install_pictures(model, processor)


def pictures(count, seed=0):
    return [read_picture(noise(*SIZES[(seed + i) % 4], seed=seed + i)) for i in range(count)]


def prompts_of(name):
    """Pictures of each prompt and completions under it; PaliGemma's processor demands a picture."""
    cases = [([0], 3), ([1, 2], 2), ([], 1), ([3], 3)]
    return [case for case in cases if case[0] or name != "paligemma"]


def rows_of(name, encoder):
    """Rows as the package makes them, and for each sequence its text and pictures for the processor."""
    draw, found = random.Random(0), pictures(4)
    rows, sequences = [], []
    for chosen, count in prompts_of(name):
        text = "".join(f"see {encoder.processor.placeholder} " for _ in chosen) + "which is it?"
        # Mllama's processor begins every text so.
        text = f"<bos>{text}" if name == "mllama" else text
        held = [found[i] for i in chosen]
        ids, placed = encoder.processor.encode(text, held, prompt=True)
        answers = [[draw.randrange(1, 250) for _ in range(draw.randint(2, 9))] for _ in range(count)]
        rows.append(Row(ids, answers, [[1] * len(a) for a in answers], pictures=[placed, *([] for _ in answers)]))
        sequences += [(text, held, answer) for answer in answers]
    return rows, sequences


def truth(name, model, processor, sequences):
    """Log-probs of each sequence alone: the processor's own tensors, the model's own forward and logits."""
    result = []
    for text, held, answer in sequences:
        images = [[picture.load() for picture in held]] if held else None
        inputs = dict(processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))
        inputs = {k: v for k, v in inputs.items() if k not in ("labels", "attention_mask")}
        prompt = inputs["input_ids"]
        inputs["input_ids"] = torch.cat([prompt, torch.tensor([answer])], 1)
        for key, fill in (("mm_token_type_ids", 0), ("token_type_ids", int(name == "paligemma"))):
            if key in inputs:
                inputs[key] = torch.cat([inputs[key], torch.full((1, len(answer)), fill)], 1)
        if "cross_attention_mask" in inputs:
            # An answer attends to what the prompt's end attends to.
            mask = inputs["cross_attention_mask"]
            inputs["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, len(answer), -1, -1)], 1)
        if name.startswith(("qwen", "glm")):
            inputs.setdefault("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))
        logits = model(**inputs, use_cache=False).logits[0].float()
        logp = torch.log_softmax(logits[:-1], -1).gather(-1, inputs["input_ids"][0, 1:, None])[:, 0]
        result.append(logp[prompt.shape[1] - 1 :])
    return torch.cat(result)


def forest(model, rows, layout):
    found = {}
    for batch in collate(rows, pad_token_id=256, layout=layout):
        found |= dict(zip(batch.origin, split_by_sequence(forward(model, batch).logp, batch), strict=True))
    return torch.cat([found[i] for i in range(len(found))])


@pytest.mark.matrix
def test_log_probs_of_a_tree_are_those_of_its_sequences_alone(family):
    name, model, processor, encoder = family
    rows, sequences = rows_of(name, encoder)
    with torch.no_grad():
        expected = truth(name, model, processor, sequences)
        for layout in (TREE, SHORT, PADDED):
            assert torch.allclose(forest(model, rows, layout), expected, atol=2e-5, rtol=0)


@pytest.mark.matrix
def test_gradients_of_a_tree_are_those_of_its_sequences_alone(family):
    name, model, processor, encoder = family
    rows, sequences = rows_of(name, encoder)
    grads = []
    for run in (lambda: truth(name, model, processor, sequences), lambda: forest(model, rows, SHORT)):
        model.zero_grad()
        run().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    model.zero_grad()
    assert grads[0].shape == grads[1].shape
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 2e-5


@pytest.fixture(scope="module")
def mllama():
    model, processor = build("mllama")
    return model, processor, install_pictures(model, processor)


def test_mllama_computes_a_tree_as_its_sequences_alone_one_tree_a_pass(mllama):
    model, processor, encoder = mllama
    layout = probe_layout(model)
    assert layout.kind == "tree" and layout.row_tokens == 1
    rows, sequences = rows_of("mllama", encoder)
    encoder.encoded = 0
    found, grads = [], []
    for run in (lambda: truth("mllama", model, processor, sequences), lambda: forest(model, rows, layout)):
        model.zero_grad()
        found.append(run())
        found[-1].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    model.zero_grad()
    assert float((found[0] - found[1]).detach().abs().max()) < 1e-5
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 2e-5
    # One picture for three answers, two for two, none, one for three.
    assert encoder.encoded == 4
    # The control: pictures exchanged.
    rows[0].pictures[0], rows[3].pictures[0] = (
        [replace(a, picture=b.picture) for a, b in zip(rows[i].pictures[0], rows[3 - i].pictures[0], strict=True)]
        for i in (0, 3)
    )
    assert float((forest(model, rows, layout) - found[0]).detach().abs().max()) > 1e-2


def test_mllama_refuses_a_pass_in_which_one_prompt_would_see_anothers_pictures(mllama):
    model, _, encoder = mllama
    rows, _ = rows_of("mllama", encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    with pytest.raises(ModelError, match="several prompts"):
        forward(model, batch)


def test_paligemma_2_reads_a_whole_prompt_both_ways_in_layers_with_a_window_too():
    """A prompt of 896 x 896 pixels is longer than its window. And its forward takes one mask for both kinds of layers."""
    model, processor = build("paligemma2")
    rows, sequences = rows_of("paligemma", install_pictures(model, processor))
    assert min(len(row.prompt_ids) for row in rows) > model.config.text_config.sliding_window
    layout = probe_layout(model)
    assert layout.kind == "tree"
    with torch.no_grad():
        expected = truth("paligemma", model, processor, sequences)
        for one in (layout, PADDED):
            assert torch.allclose(forest(model, rows, one), expected, atol=2e-5, rtol=0)


def test_a_picture_is_encoded_once_for_a_group_and_for_every_prompt_that_shows_it(family, monkeypatch):
    _, model, _, encoder = family
    monkeypatch.setattr(encoder, "_kept", type(encoder._kept)())
    one, other = pictures(2)
    text = f"see {encoder.processor.placeholder} which is it?"
    rows = []
    for picture in (one, other, one):
        ids, placed = encoder.processor.encode(text, [picture], prompt=True)
        rows.append(Row(ids, [[65]] * 4, [[1]] * 4, pictures=[placed, [], [], [], []]))
    for layout in (TREE, PADDED):
        encoder.encoded = 0
        (batch,) = collate(rows, pad_token_id=256, layout=layout)
        forward(model, batch)
        assert encoder.encoded == 2


def test_a_picture_with_holes_is_another_one_on_another_background(family):
    """One host serves runs of both; so it is asked for white, then for black."""
    _, model, _, encoder = family
    holes = noise(84, 56)
    holes.putalpha(0)
    text = f"see {encoder.processor.placeholder} which is it?"
    found = []
    with torch.no_grad():
        for background in ("white", "black"):
            ids, placed = encoder.processor.encode(text, [read_picture(holes, background=background)], prompt=True)
            row = Row(ids, [[65]], [[1]], pictures=[placed, []])
            (batch,) = collate([row], pad_token_id=256, layout=TREE)
            found.append(forward(model, batch).logp[batch.loss_mask])
    assert not torch.allclose(*found, atol=1e-6)


def test_features_are_kept_while_the_tower_is_frozen_and_not_a_moment_longer(family):
    name, model, _, encoder = family
    rows, _ = rows_of(name, encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    named = tower_parameters(model)
    try:
        for parameter in named.values():
            parameter.requires_grad_(False)
        first = forward(model, batch).logp
        encoder.encoded = 0
        assert torch.equal(forward(model, batch).logp, first) and encoder.encoded == 0
        with torch.no_grad():
            next(iter(named.values())).mul_(1.0)
        forward(model, batch)
        assert encoder.encoded > 0
    finally:
        for parameter in named.values():
            parameter.requires_grad_(True)
    encoder.encoded = 0
    forward(model, batch)
    assert encoder.encoded > 0


@pytest.mark.matrix
def test_features_of_an_adapter_in_the_tower_are_not_those_without_it(family):
    """Where nothing of the tower learns, policy and reference differ by what is switched on alone."""
    name, model, _, encoder = family
    rows, _ = rows_of(name, encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    tower = {id(one) for one in tower_parameters(model).values()}
    layers = [
        path for path, module in model.named_modules() if type(module) is torch.nn.Linear and id(module.weight) in tower
    ]
    config = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    policy = peft.get_peft_model(copy.deepcopy(model), config).requires_grad_(False)
    bare = forward(model, batch).logp
    moved = forward(policy, batch).logp
    with policy.disable_adapter():
        assert torch.allclose(forward(policy, batch).logp, bare, atol=1e-5)
    assert not torch.allclose(moved, bare, atol=1e-5)
    assert torch.equal(forward(policy.requires_grad_(False), batch).logp, moved)


def test_features_are_encoded_anew_after_a_step_of_a_fused_optimiser(family):
    name, model, _, encoder = family
    rows, _ = rows_of(name, encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    weights = list(tower_parameters(model).values())
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        first = forward(model, batch).logp
        forward(model, batch)
    try:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(weights, lr=0.1, fused=True).step()
        encoder.encoded = 0
        with torch.no_grad():
            assert not torch.equal(forward(model, batch).logp, first) and encoder.encoded > 0
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.grad, weight.data = None, old


def test_exchanged_pictures_move_log_probs_of_their_own_rows_alone(family):
    _, model, _, encoder = family
    text = f"see {encoder.processor.placeholder} which is it?"

    def run(held):
        rows = []
        for picture in held:
            ids, placed = encoder.processor.encode(text, [picture], prompt=True)
            rows.append(Row(ids, [[65, 66], [67]], [[1, 1], [1]], pictures=[placed, [], []]))
        with torch.no_grad():
            return forest(model, rows, TREE)

    one, other, third = (read_picture(noise(84, 56, seed=i)) for i in range(3))
    moved = (run([one, other]) - run([one, third])).abs()
    assert moved[:3].max() < 1e-5 and moved[3:].max() > 1e-2


def test_pictures_in_branches_give_what_each_sequence_alone_gives(family):
    name, model, _, encoder = family
    if name == "paligemma":
        pytest.skip("its completions hold text alone")
    one, other = pictures(2)
    processor = encoder.processor
    ids, placed = processor.encode(f"see {processor.placeholder} and", [one])
    tool, inside = processor.encode(f"look {processor.placeholder} so", [other])
    mask = [int(token not in processor.controls.values()) for token in tool]
    shared = Row(ids, [tool, [70, 71]], [mask, [1, 1]], pictures=[placed, inside, []])
    moved = [type(p)(p.picture, p.start + len(ids), p.count, p.grid) for p in inside]
    alone = [
        Row([], [ids + tool], [[0] * len(ids) + mask], pictures=[[], placed + moved]),
        Row([], [[*ids, 70, 71]], [[0] * len(ids) + [1, 1]], pictures=[[], placed]),
    ]
    with torch.no_grad():
        tree, apart = forest(model, [shared], TREE), [forest(model, [row], PADDED)[len(ids) :] for row in alone]
    assert torch.allclose(tree, torch.cat(apart), atol=2e-5)


def test_lost_or_foreign_pictures_stop_the_pass(family):
    name, model, _, encoder = family
    rows, _ = rows_of(name, encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    batch = replace(batch, pictures=batch.pictures[:-1])
    with pytest.raises(ModelError, match="PT-G011"):
        forward(model, batch)


def test_rows_with_pictures_come_back_from_a_batch_and_from_its_halves(family):
    name, model, _, encoder = family
    rows, _ = rows_of(name, encoder)
    (batch,) = collate(rows, pad_token_id=256, layout=TREE, together=True)
    key = lambda row: (row.prompt_ids, row.completions, row.pictures)  # noqa: E731
    made = sorted((key(row) for row in to_rows(batch)), key=str)
    assert made == sorted(((r.prompt_ids, r.completions, r.pictures if any(r.pictures) else []) for r in rows), key=str)
    with torch.no_grad():
        whole = forward(model, batch).logp.sum()
        parts = sum(forward(model, part).logp.sum() for part in halves(batch, pad_token_id=256, layout=TREE))
    assert torch.allclose(whole, parts, atol=1e-4)


def test_equal_prompts_are_shared_only_with_equal_pictures(family):
    _, _, _, encoder = family
    text = f"see {encoder.processor.placeholder} which?"
    one, other = read_picture(noise(84, 56, 1)), read_picture(noise(84, 56, 2))
    rows = []
    for picture in (one, other, one):
        ids, placed = encoder.processor.encode(text, [picture])
        rows.append(Row(ids, [[65]], [[1]], pictures=[placed, []]))
    assert rows[0].prompt_ids == rows[1].prompt_ids
    shared, places = share_prompts(rows)
    assert places == [0, 2, 1] and [len(row.completions) for row in shared] == [2, 1]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_three_rows_are_those_of_the_model(name):
    model, processor = build(name)
    encoder = install_pictures(model, processor)
    rows, _ = rows_of(name, encoder)
    for row in rows:
        sequence = torch.tensor([row.prompt_ids + row.completions[0]])
        first = {name: getattr(row, name)[:1] for name in ("completions", "loss_masks")}
        (batch,) = collate([replace(row, **first, pictures=row.pictures[:2])], pad_token_id=256, layout=TREE)
        grids = encoder.processor.join([encoder.processor.prepare(p.picture) for p in row.pictures[0]] or [{}])
        kinds = (sequence == encoder.processor.token_id).int()
        expected, _ = model.model.get_rope_index(sequence, kinds, grids.get("image_grid_thw"))
        assert torch.equal(grid_positions(batch), expected)


def test_a_processor_of_another_family_is_refused():
    model, _ = build("llava")
    _, processor = build("smolvlm")
    with pytest.raises(ModelError, match="PT-G004"):
        install_pictures(model, processor)


def test_a_processor_that_counts_other_tokens_is_refused():
    model, processor = build("llava")
    processor.patch_size = 7
    with pytest.raises(ModelError, match="PT-G004"):
        install_pictures(model, processor)


@pytest.fixture(scope="module", params=["glm4v", "deepseek_vl", "ovis2"])
def unknown(request):
    model, processor = build(request.param)
    return request.param, model, processor, install_pictures(model, processor)


@pytest.mark.matrix
def test_rows_of_an_unknown_family_are_those_of_its_processor_and_its_own_forward(unknown):
    name, model, processor, encoder = unknown
    layout = probe_layout(model)
    # The last takes no features without others of its own: its processor's tensors then.
    assert (layout.kind, encoder.processor.family.whole) == (("padded", True) if name == "ovis2" else ("tree", False))
    rows, sequences = rows_of(name, encoder)
    grads = []
    for run in (lambda: truth(name, model, processor, sequences), lambda: forest(model, rows, layout)):
        model.zero_grad()
        value = run()
        value.sum().backward()
        grads.append((value.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    model.zero_grad()
    assert torch.allclose(grads[0][0], grads[1][0], atol=2e-5, rtol=0)
    assert float((grads[0][1] - grads[1][1]).norm() / grads[0][1].norm()) < 2e-5


def test_an_unknown_family_is_proven_in_half_precision_too():
    model, processor = build("glm4v")
    assert install_pictures(model.bfloat16(), processor).processor.family.positions == "grid"
    assert probe_layout(model).kind == "tree"


def test_an_unknown_family_whose_images_change_nothing_is_refused():
    model, processor = build("deepseek_vl")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "aligner" in name:
                parameter.zero_()
    with pytest.raises(ModelError, match="PT-G005"):
        install_pictures(model, processor)
    assert "picture_encoder" not in vars(model)


def test_an_unknown_family_that_sees_later_tokens_is_refused_with_the_difference(monkeypatch):
    model, processor = build("glm4v")
    own = type(model).forward

    def both_ways(self, input_ids=None, **inputs):
        out = own(self, input_ids=input_ids, **inputs)
        out.logits = out.logits + out.logits.mean(1, keepdim=True)
        return out

    monkeypatch.setattr(type(model), "forward", both_ways)
    with pytest.raises(ModelError, match=r"earlier tokens attend to later tokens: outputs differ by \d"):
        install_pictures(model, processor)


def test_an_unknown_family_that_prepares_two_pictures_otherwise_than_one_is_refused():
    model, processor = build("llava_onevision")
    with pytest.raises(ModelError, match=r"processor returns \d+ tokens, but \d+ were expected"):
        install_pictures(model, processor)


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_forward_method_without_an_argument_for_features_gets_them_as_its_own(name, monkeypatch):
    """As in transformers before 5.18, whose forward methods ignored the unknown argument, and thus the images."""
    from posttrain.extensions.images import encoder as vision

    monkeypatch.setattr(vision, "_accepts_features", lambda _: False)
    model, processor = build(name)
    encoder = install_pictures(model, processor)
    rows, sequences = rows_of(name, encoder)
    found, grads = [], []
    for run in (lambda: truth(name, model, processor, sequences), lambda: forest(model, rows, TREE)):
        model.zero_grad()
        found.append(run())
        found[-1].sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(found[1], found[0], atol=2e-5, rtol=0)
    assert float((grads[0] - grads[1]).norm() / grads[0].norm()) < 2e-5
    assert "get_image_features" not in vars(model.model)
    row = next(row for row in rows if row.pictures[0])
    ids = torch.tensor([row.prompt_ids])
    with torch.no_grad():
        inputs = vision.prefill_inputs(model, ids, row.pictures[:1])
        high = list(range(250, model.get_output_embeddings().out_features))
        options = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 256, "suppress_tokens": high}
        sampled = model.generate(input_ids=ids, **inputs, **options)[0, -1]
        answers = [[token] for token in range(250)]
        every = Row(row.prompt_ids, answers, [[1]] * 250, pictures=[*row.pictures[:1], *[[]] * 250])
        best = forest(model, [every], TREE).argmax()
    assert "pixel_values" in inputs and int(sampled) == int(best)


@pytest.mark.matrix
def test_the_probe_of_a_layout_holds_pictures(family, monkeypatch):
    from posttrain.extensions.images import encoder as vision
    from posttrain.models import probe

    name, model, _, _ = family
    monkeypatch.setattr(probe, "PROBED", {})
    assert probe.probe_layout(model).kind == "tree"
    if name.startswith("qwen"):
        monkeypatch.setattr(vision, "grid_positions", lambda batch: batch.position_ids)
    elif name in ("gemma3", "paligemma"):
        monkeypatch.setattr(vision, "block_spans", lambda *_: None)
    else:
        return
    monkeypatch.setattr(probe, "PROBED", {})
    with raises(ModelError):
        probe.probe_layout(model)


def test_shards_of_a_model_that_skips_layers_without_pictures_are_refused():
    """Two processes with FSDP2, one of them without pictures, gathered different layers."""
    for name, kind, fits in (("mllama", "FSDP", False), ("mllama", "MULTI_GPU", True), ("llava", "FSDP", True)):
        model, processor = build(name)
        install_pictures(model, processor)
        run = SimpleNamespace(distributed_type=f"DistributedType.{kind}", num_processes=2, state=SimpleNamespace())
        if fits:
            refuse_skipped_layers(model, run)
        else:
            with pytest.raises(ModelError, match=r"Mllama.* on 2 processes .*FSDP.*Fix: use DDP"):
                refuse_skipped_layers(model, run)
