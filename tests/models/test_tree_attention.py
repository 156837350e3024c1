"""Attention over tries, by parts: equal to every sequence alone, forward and backward, whatever the trie looks like."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from posttrain.data.forest import Layout, collate, split_by_sequence
from posttrain.data.trie import check_segments
from posttrain.errors import DataError, ModelError
from posttrain.models import attention, probe, tree_attention
from posttrain.models.architecture import attention_name
from posttrain.models.forward import forward, sequence_logps
from posttrain.models.tree_attention import Forest, forest_mask, parts_of
from posttrain.types import Batch, Row, Segment
from tests.conftest import build_model
from tests.gpu import varlen
from tests.methods.helpers import sft
from tests.models.architectures import built
from tests.models.test_forward import family
from tests.wordings import raises


def forest(parents, lengths, rows=1):
    """Tries with these segments, listed depth first, in each of so many rows."""
    ends, columns = {}, [0]
    for length in lengths:
        columns.append(columns[-1] + length)
    for index in range(len(parents)):
        under = index
        while under + 1 < len(parents) and descends(parents, under + 1, index):
            under += 1
        ends[index] = columns[under + 1]
    segments, positions = [], {}
    for row in range(rows):
        for index, parent in enumerate(parents):
            positions[index] = 0 if parent < 0 else positions[parent] + lengths[parent]
            up = -1 if parent < 0 else parent + row * len(parents)
            segments.append(Segment(row, columns[index], columns[index + 1], ends[index], up, positions[index]))
    width = columns[-1]
    until, position = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for one in segments:
        until[one.row, one.start : one.stop] = one.end
        position[one.row, one.start : one.stop] = torch.arange(one.position, one.position + one.stop - one.start)
    none = torch.zeros_like(until)
    return Batch(none, position, until, none, none.bool(), none - 1, 0, tuple(segments))


def descends(parents, index, ancestor):
    while index > ancestor:
        index = parents[index]
    return index == ancestor


def truth(q, k, v, batch, scale, sinks=None, *, window=None, softcap=None, chunk=None):
    """Softmax over a dense mask, written out."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = (q @ k.transpose(2, 3)) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~forest_mask(batch, window, chunk), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def inputs(batch, heads, kv, size, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    rows, width = batch.input_ids.shape
    # As models give them: (B, T, heads, d) with two axes swapped.
    q, k, v = (torch.randn(rows, width, n, size, generator=g).to(dtype).transpose(1, 2) for n in (heads, kv, kv))
    return [x.detach().requires_grad_() for x in (q, k, v)]


def assert_equal(batch, heads=4, kv=2, size=16, *, sinked=False, tolerance=1e-5, values=None, **rule):
    q, k, v = inputs(batch, heads, kv, size)
    v = v if values is None else inputs(batch, heads, kv, values)[2]
    sinks = torch.linspace(-1, 2, heads).requires_grad_() if sinked else None
    given = [q, k, v, *[sinks] * sinked]
    expected = truth(q, k, v, batch, 0.3, sinks, **rule)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * weight).sum(), given)
    found = tree_attention.tree_attention(q, k, v, Forest(batch), scale=0.3, sinks=sinks, **rule)
    got = torch.autograd.grad((found * weight).sum(), given)
    for a, b in zip((found, *got), (expected, *wanted), strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# Parents of segments, depth first: from the tree with one segment to one that is five deep.
SHAPES = {
    "one sequence": [-1],
    "packed": [-1, -1, -1],
    "a group": [-1, 0, 0, 0, 0],
    "two groups": [-1, 0, 0, -1, 3, 3, 3],
    "turns": [-1, 0, 1, 1, 0, 4, 4, 0],
    "five deep": [-1, 0, 1, 2, 3, 3, 2, 1, 7, 7, 0],
}


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_parts_equal_a_dense_mask(parents):
    """Windows shorter than a segment, that end inside an ancestor, and longer than any path; sinks; grouped queries; rows."""
    lengths = [(7 * i) % 23 + 1 for i in range(len(parents))]
    for window in (None, 1, 2, 5, 9, 1000):
        for sinked in (False, True):
            assert_equal(forest(parents, lengths, rows=2), window=window, sinked=sinked)
    assert_equal(forest(parents, [300, *lengths[1:]]), window=32)
    for heads, kv in ((1, 1), (6, 6), (6, 1)):
        assert_equal(forest(parents, lengths), heads, kv, size=8)
    for values in (12, 24):
        assert_equal(forest(parents, lengths, rows=2), window=5, sinked=True, values=values)


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_bounded_scores_equal_a_dense_mask(parents):
    """Segments longer than a block of queries, windows, sinks, grouped queries."""
    lengths = [300, *[(7 * i) % 23 + 1 for i in range(1, len(parents))]]
    for window in (None, 5, 280):
        assert_equal(forest(parents, lengths, rows=2), window=window, sinked=window == 5, softcap=0.7)


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_chunks_of_positions_equal_a_dense_mask(parents):
    """Chunks that begin inside a segment and end in its children, of one token, and longer than any path."""
    lengths = [(7 * i) % 23 + 1 for i in range(len(parents))]
    for chunk in (1, 4, 9, 1000):
        assert_equal(forest(parents, lengths, rows=2), chunk=chunk)
        assert_equal(forest(parents, [30, *lengths[1:]]), chunk=chunk)


@st.composite
def tries(draw):
    count = draw(st.integers(1, 40))
    parents, path = [-1], [0]
    for index in range(1, count):
        keep = draw(st.integers(0, min(len(path), 4)))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(index)
    return parents, draw(st.lists(st.integers(1, 300), min_size=count, max_size=count))


@settings(max_examples=25, deadline=None)
@given(tries(), st.sampled_from([None, None, 3, 40, 200]), st.booleans())
def test_parts_of_random_tries_equal_a_dense_mask(trie, window, sinked):
    parents, lengths = trie
    while sum(lengths) > 700:
        lengths = [max(1, length // 2) for length in lengths]
    assert_equal(forest(parents, lengths), window=window, sinked=sinked)


def test_half_precision_is_as_near_to_the_truth_as_a_dense_mask_is():
    batch = forest(SHAPES["five deep"], [40, 7, 30, 1, 25, 60, 3, 17, 9, 21, 33])
    q, k, v = inputs(batch, 4, 2, 16)
    exact = truth(q, k, v, batch, 0.25)
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((exact * weight).sum(), (q, k, v))
    gaps = []
    for product in ("parts", "dense"):
        half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        parts = product == "parts"
        out = tree_attention.tree_attention(*half, Forest(batch), scale=0.25) if parts else truth(*half, batch, 0.25)
        grads = torch.autograd.grad((out.float() * weight).sum(), half)
        gaps.append([(a.float() - b).abs().max().item() for a, b in zip((out, *grads), (exact, *wanted), strict=True)])
    assert all(a <= 2 * b for a, b in zip(*gaps, strict=True)), gaps


def test_gradients_are_those_of_finite_differences():
    batch = forest([-1, 0, 1, 0], [3, 2, 2, 3])
    q, k, v = (x.detach().double().requires_grad_() for x in inputs(batch, 2, 1, 4))
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    state = Forest(batch)
    for window in (None, 3):
        assert torch.autograd.gradcheck(
            lambda *x, window=window: tree_attention.tree_attention(
                *x[:3], state, scale=0.5, window=window, sinks=x[3]
            ),
            (q, k, v, sinks),
            fast_mode=True,
        )


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_the_calls_of_an_accelerator_equal_a_dense_mask(parents, monkeypatch):
    """One call a level of all tries; the two operators that no CPU has are stood in for by what they are documented to do."""
    monkeypatch.setattr(tree_attention, "_by_parts", tree_attention._by_levels)
    monkeypatch.setattr(tree_attention, "_parts_backward", tree_attention._levels_backward)
    lengths = [(7 * i) % 23 + 1 for i in range(len(parents))]
    flat = all(parent < 0 for parent in parents)
    with varlen.standing_in():
        for sinked in (False, True):
            assert_equal(forest(parents, lengths, rows=2), sinked=sinked)
        assert_equal(forest(parents, lengths), window=4 if flat else 1000)


def test_the_operators_of_an_accelerator_take_what_they_are_given():
    """Names of arguments, read from the installed torch."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [one.name for one in schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert names[10:13] == ["scale", "window_size_left", "window_size_right"]
    assert [one.name for one in schema.returns][:2] == ["output", "softmax_logsumexp"]
    names = [one.name for one in torch.ops.aten._flash_attention_backward.default._schema.arguments]
    assert names[:12] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal",
    ]  # fmt: skip
    assert names[14:] == ["scale", "window_size_left", "window_size_right"]


def test_the_pairs_computed_are_those_that_are_visible():
    """Work grows with what tokens see: up to the other half of each triangle, nothing that a mask would hide is computed."""
    batch = forest([-1, *[0] * 8], [512, *[1024] * 8])
    computed = sum(
        (part.queries.stop - part.queries.start) * (part.keys.stop - part.keys.start) / (2 if part.causal else 1)
        for part in parts_of(batch.segments)
    )
    visible = 512 * 513 / 2 + 8 * (1024 * 512 + 1024 * 1025 / 2)
    assert computed == pytest.approx(visible, rel=0.01)
    assert computed < batch.input_ids.numel() ** 2 / 8


@pytest.mark.parametrize("window", [4, 100])
def test_a_window_costs_its_size(window):
    parts = parts_of(forest([-1, 0], [3000, 2000]).segments, window)
    pairs = sum((p.queries.stop - p.queries.start) * (p.keys.stop - p.keys.start) for p in parts)
    assert pairs <= 2.1 * 5000 * window


def test_padding_is_zero_and_gets_no_gradient():
    rows = [Row([1, 2], [[3, 4], [5]], [[1, 1], [1]]), Row([6], [[7], [8]], [[1], [1]])]
    (batch,) = collate(
        rows, pad_token_id=0, layout=Layout(row_tokens=1, dense_mask=True, pass_tokens=100), together=True
    )
    assert not batch.real.all()
    q, k, v = inputs(batch, 2, 2, 8)
    out = tree_attention.tree_attention(q, k, v, Forest(batch), scale=1.0)
    out.sum().backward()
    outside = ~batch.real[:, None, :, None].expand_as(out)
    for x in (out, q.grad, k.grad, v.grad):
        assert (x[outside] == 0).all()


FAULTS = {
    "a parent that does not stand before": (Segment(0, 0, 2, 4, -1, 0), Segment(0, 2, 4, 4, 5, 2)),
    "empty": (Segment(0, 0, 0, 0, -1, 0),),
    "a position that does not follow": (Segment(0, 0, 2, 4, -1, 0), Segment(0, 2, 4, 4, 0, 7)),
    "beyond the row": (Segment(0, 0, 20, 20, -1, 0),),
    "a gap": (Segment(0, 0, 2, 2, -1, 0), Segment(0, 3, 4, 4, -1, 0)),
    "outside of its parent": (Segment(0, 0, 2, 2, -1, 0), Segment(0, 2, 4, 4, 0, 2)),
}


@pytest.mark.parametrize("segments", FAULTS.values(), ids=FAULTS)
def test_segments_that_are_no_tries_are_refused(segments):
    with raises(DataError, "segment"):
        check_segments(segments, 10)


@pytest.mark.parametrize("kept", [(), slice(0, 3), "other rows"])
def test_a_batch_whose_rows_have_no_segments_is_refused(kept):
    """Else its packed sequences would be taken for one."""
    (batch,) = collate([Row([5, 6], [[7], [8, 9]], [[1], [1, 1]]), Row([3], [[4]], [[1]])], pad_token_id=0)
    moved = [one._replace(row=1) for one in batch.segments]
    batch = replace(
        batch, segments=() if kept == () else tuple(moved if kept == "other rows" else batch.segments[kept])
    )
    with raises(DataError, "a Batch with 1 rows", "Fix: create the batch with collate"):
        forward(build_model(97), batch)


def test_a_row_without_tokens_has_no_segments():
    rows = [Row([], [[], [5, 6]], [[], [1, 1]])]
    for layout in (Layout(row_tokens=1), Layout("padded", row_tokens=100)):
        for batch in collate(rows, pad_token_id=0, layout=layout, together=True):
            assert torch.isfinite(forward(build_model(97), batch).logp).all()


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe", "gpt-oss"])
def test_a_router_whose_balance_is_trained_takes_segments(name):
    """Its layers are told to give the router's logits, which attention does not read."""
    rows = [Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])]
    (batch,) = collate(rows, pad_token_id=0)
    with tree_attention.refusing():
        assert forward(built(name), batch, frozenset({"logp", "aux"})).aux_loss > 0


def test_dropout_in_attention_by_any_name_asks_for_a_mask():
    """In training its layers would take one of a row as wide as segments make it."""
    assert attention.dense_layers(built("gpt2", attn_pdrop=0.1), None, "cpu").startswith("attn_pdrop=0.1 ")


def test_a_model_that_moves_to_a_gpu_later_is_laid_out_for_the_gpu(monkeypatch):
    """FSDP has it on the CPU until its layers are cut: rows, and the kernel that is tried, are of where it trains."""
    asked = []
    monkeypatch.setattr(
        tree_attention, "kernel_fault", lambda device, dtype, *_: asked.append((device.type, dtype)) or ""
    )
    monkeypatch.setattr(probe, "PROBED", {})
    model, gpu = build_model(97), torch.device("cuda")
    assert not probe.probe_layout(model, torch.bfloat16, gpu).dense_mask
    assert not probe.probe_layout(model, torch.bfloat16).dense_mask
    assert asked == [("cuda", torch.bfloat16), ("cpu", torch.float32)]
    assert probe.probe_layout(model, None, gpu) == Layout("tree", dense_mask=True, row_tokens=2048, pass_tokens=32768)


@pytest.mark.parametrize(
    ("billions", "tokens"), [(0.0001, 32768), (0.494, 30336), (1.54, 9728), (7.6, 2048), (70, 2048)]
)
def test_a_pass_on_a_gpu_is_larger_for_a_smaller_model(billions, tokens):
    """Else the host launches kernels for longer than the GPU computes: 2.4 s for a step of 0.4 s, seen on an H200."""
    weights = torch.empty(int(billions * 1e9), device="meta")
    assert attention.gpu_tokens(SimpleNamespace(parameters=lambda: iter([weights]))) == tokens


def test_a_step_of_a_small_model_on_a_gpu_is_one_pass():
    documents = [Row([], [[5] * 774], [[1] * 774]) for _ in range(32)]
    for layout in (
        attention.layout_for(built("llama"), device="cuda", autocast=torch.bfloat16, dense_mask=dense)
        for dense in (False, True)
    ):
        (batch,) = collate(documents, pad_token_id=0, layout=layout)
        assert batch.input_ids.numel() == 32 * 774


def test_max_row_tokens_limits_the_passes_of_a_gpu_too():
    """Passes of a dense mask kept 32,768 tokens, so a smaller row saved no memory. Those of a CPU keep 512."""
    gpu = attention.layout_for(built("llama"), device="cuda", dense_mask=True)
    assert (gpu.adjusted(1024).row_tokens, gpu.adjusted(1024).pass_tokens) == (1024, 1024)
    cpu = attention.layout_for(built("llama"), dense_mask=True)
    assert [(one.row_tokens, one.pass_tokens) for one in (cpu.adjusted(128), cpu.adjusted(None))] == [
        (128, 512),
        (256, 512),
    ]
    assert replace(cpu, row_tokens=1).adjusted(128).row_tokens == 1
    assert cpu.adjusted(None, 64) == replace(cpu, pad_to_multiple_of=64)


def test_a_kernel_whose_gradients_are_wrong_is_not_taken(monkeypatch):
    """What the probe asks of a device: output and gradients, at the heads of the model."""
    assert tree_attention.kernel_fault(torch.device("cpu"), torch.float32, 6, 2, 16) == ""
    assert tree_attention.kernel_fault(torch.device("cpu"), torch.bfloat16, 4, 4, 8) == ""
    right = tree_attention._parts_backward

    def wrong(*args):
        dq, dk, dv = right(*args)
        return dq, dk * 1.01, dv

    monkeypatch.setattr(tree_attention, "_parts_backward", wrong)
    assert tree_attention.kernel_fault(torch.device("cpu"), torch.float32, 6, 2, 16).startswith("dk of tree attention")


def test_a_model_whose_gradients_would_be_wrong_gets_a_mask(monkeypatch, caplog):
    monkeypatch.setattr(tree_attention, "kernel_fault", lambda *_: "dk differs")
    monkeypatch.setattr(probe, "PROBED", {})
    layout = probe.probe_layout(build_model(97))
    assert layout.kind == "tree" and layout.dense_mask
    assert "dk differs" in caplog.text and "dense mask" in caplog.text


def test_a_layer_that_takes_no_segments_gets_a_mask_and_says_why(caplog, monkeypatch):
    """Without the probe, which would have chosen rows for it: right all the same."""
    monkeypatch.setattr(tree_attention, "_logged", set())
    model = family("llama")
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-9
    model.train()
    rows = [Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])]
    truth = sequence_logps(model, rows)
    (batch,) = collate(rows, pad_token_id=0)
    found = split_by_sequence(forward(model, batch).logp, batch)
    for a, b in zip(found, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    assert "attention_dropout=1e-09" in caplog.text


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_block_lists_made_on_the_host_cover_what_is_visible(parents, window):
    """Whole blocks are visible whole, and what is in no list is hidden; nothing of T x T is made for it."""
    batch = forest(parents, [(211 * i) % 390 + 1 for i in range(len(parents))], rows=2)
    dense = forest_mask(batch, window)[:, 0]
    width, size = dense.shape[-1], 128
    blocks = tree_attention.block_mask(batch, window, None, None)
    count = -(-width // size)
    padded = torch.nn.functional.pad(dense, (0, count * size - width, 0, count * size - width))
    grid = padded.view(2, count, size, count, size).transpose(2, 3)  # (B, query block, key block, 128, 128)
    some, whole = torch.zeros(2, 2, count, count, dtype=torch.bool)
    for found, number, index in (
        (some, blocks.kv_num_blocks, blocks.kv_indices),
        (whole, blocks.full_kv_num_blocks, blocks.full_kv_indices),
    ):
        for b in range(2):
            for q in range(count):
                found[b, q, index[b, 0, q, : number[b, 0, q]].long()] = True
    assert not (some & whole).any()
    assert (grid.all(-1).all(-1) | ~whole).all()
    assert (some | whole | ~grid.any(-1).any(-1)).all()
    rule = blocks.mask_mod(
        *torch.meshgrid(torch.arange(2), torch.zeros(1).long(), torch.arange(width), torch.arange(width), indexing="ij")
    )
    assert torch.equal(rule[:, 0], dense)


def test_blocks_below_the_diagonal_of_a_long_sequence_are_whole():
    blocks = tree_attention.block_mask(forest([-1], [700]), None, None, None)
    assert blocks.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 4, 0]]]
    assert blocks.kv_num_blocks.tolist() == [[[1, 1, 1, 1, 1, 6]]]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_tree_attention_has_a_name_of_its_own_and_replaces_nothing(backend):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    before = dict(ALL_ATTENTION_FUNCTIONS), AttentionInterface.get_interface
    model, other = family("llama", backend).eval(), family("llama", backend).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    truth = model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits
    (batch,) = collate([Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])], pad_token_id=0)
    with torch.no_grad():
        forward(model, batch)
    assert model.config._attn_implementation == backend
    forward(model, batch)  # Its backward may call the layers again.
    assert model.config._attn_implementation == f"posttrain_{backend}" and attention_name(model.config) == backend
    assert torch.equal(model(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1]])).logits, truth)
    assert other.config._attn_implementation == backend
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in before[0]} == before[0]
    assert AttentionInterface.get_interface is before[1]
    with tree_attention.uninstalled(model):
        assert model.config._attn_implementation == backend
    tree_attention.uninstall(model)
    assert model.config._attn_implementation == backend
    tree_attention.install(model)
    model.set_attn_implementation("eager" if backend == "sdpa" else "sdpa")
    assert not model.config._attn_implementation.startswith("posttrain")


def test_after_training_the_config_names_the_backend_of_transformers(tmp_path, tiny_tokenizer):
    trainer = sft(tmp_path, tiny_tokenizer, max_steps=1)
    seen = []
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(trainer.model.config._attn_implementation))
    trainer.train()
    assert "posttrain_sdpa" in seen and trainer.model.config._attn_implementation == "sdpa"


def test_a_checkpointed_layer_is_recomputed_by_parts():
    """Backward calls the layers again, behind the forward pass."""
    (batch,) = collate([Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])], pad_token_id=0)
    gradients = []
    for checkpointed in (False, True):
        model = build_model(97).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        forward(model, batch).logp.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_layer_that_takes_no_segments_gets_its_backend_back(monkeypatch):
    monkeypatch.setattr(probe, "PROBED", {})
    model = family("llama", "eager")
    model.config.attention_dropout = 0.1
    assert probe.probe_layout(model).dense_mask and model.config._attn_implementation == "eager"
    monkeypatch.setattr(tree_attention, "kernel_fault", lambda *_: "wrong")
    model = build_model(97)
    assert probe.probe_layout(model).dense_mask and model.config._attn_implementation == "sdpa"


def test_plain_attention_of_other_models_stays_what_each_layer_says():
    """transformers registers it under no name: a subclass inherits it from another file."""
    from transformers.models.llama import modeling_llama

    plain, given = family("llama", "eager"), family("llama", "eager")

    class Own(modeling_llama.LlamaAttention):
        """Of a user's script."""

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for index, layer in enumerate(given.model.layers):
        weights, layer.self_attn = layer.self_attn.state_dict(), Own(given.config, index)
        layer.self_attn.load_state_dict(weights)
    tree_attention.install(given)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(given.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
    rows = [Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])]
    (batch,) = collate(rows, pad_token_id=0)
    for a, b in zip(split_by_sequence(forward(given, batch).logp, batch), sequence_logps(plain, rows), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert tree_attention._written_out(Own) is modeling_llama.eager_attention_forward
    with raises(ModelError):
        tree_attention._written_out(nn.Linear)


@pytest.mark.matrix
@pytest.mark.slow
def test_layers_may_be_compiled():
    model, rows = build_model(97), [Row([5, 6, 7], [[8, 9], [10, 11, 12]], [[1] * 2, [1] * 3])]
    truth = sequence_logps(model, rows)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    (batch,) = collate(rows, pad_token_id=0)
    found = forward(model, batch).logp
    found.sum().backward()
    for a, b in zip(split_by_sequence(found, batch), truth, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_parts_of_one_size_share_their_mask():
    """A window of w tokens over T of them takes a mask of w x w, not T x w numbers."""
    tries = Forest(forest([-1], [512]))
    masks = {id(tries.mask(part, 64, torch.float32)) for part in tries.parts(64) if part.ahead is not None}
    assert len(tries.parts(64)) == 15 and len(masks) == 1


def test_what_travels_with_a_forward_call_is_not_copied_by_fsdp():
    """With mixed precision FSDP2 makes copies of dataclasses among a layer's arguments, to cast the tensors in them."""
    from torch.distributed.utils import _apply_to_tensors

    (batch,) = collate([Row([3, 4], [[5, 6], [7]], [[1, 1], [1]])], pad_token_id=0, layout=Layout("tree"))
    forest = Forest(batch)
    assert _apply_to_tensors(lambda x: x.to(torch.bfloat16), {"forest": forest})["forest"] is forest
