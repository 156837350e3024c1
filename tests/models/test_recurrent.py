"""Recurrent layers on packed prefix trees equal each sequence alone, in outputs and gradients."""

import sys
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn.functional import normalize

from posttrain import DPOConfig, DPOTrainer
from posttrain.data.forest import collate, split_by_sequence
from posttrain.errors import ModelError
from posttrain.extensions.sequence_parallel.split import TokenSplit
from posttrain.loop import build
from posttrain.models import logprob
from posttrain.models.attention import layout_for, padded_layout
from posttrain.models.forward import forward
from posttrain.models.probe import _fault, probe_cases
from posttrain.models.recurrent import chunks, functions, table, trees
from posttrain.models.recurrent.scan import scan
from posttrain.models.tree_attention import Forest
from posttrain.rollouts.native.engine import native_is_exact
from posttrain.types import Row, Segment
from tests.methods.helpers import grpo, sft
from tests.models.architectures import HYBRIDS, VOCAB, alone, built
from tests.wordings import raises

WIDTH = 140
# Rows of trees: the length and the parent of each segment. They include empty segments, segments of one token, and whole chunks.
TREES = [
    [[(70, -1), (40, 0), (3, 0), (1, 0)], [(5, -1), (2, 0), (0, 0), (9, 2), (50, -1)]],
    [[(1, -1), (1, 0), (64, 1), (32, 0)], [(32, -1), (5, 0), (64, 1)]],
]


def segments_of(trees):
    """Segments of rows of trees."""
    segments = []
    for row, lengths in enumerate(trees):
        first = len(segments)
        starts = accumulate((length for length, _ in lengths), initial=0)
        for (length, parent), start in zip(lengths, starts, strict=False):
            segments.append(Segment(row, start, start + length, 0, first + parent if parent >= 0 else -1, 0))
    return segments


def columns(segments, index):
    """Flat indices of a segment's tokens and of all tokens before them."""
    one = segments[index]
    own = list(range(one.row * WIDTH + one.start, one.row * WIDTH + one.stop))
    return own if one.parent < 0 else columns(segments, one.parent) + own


def token_by_token(q, k, v, g, beta):
    """``(T, H, dv)`` outputs of the recurrence as the papers write it."""
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, out = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]), []
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        update = v[t] if beta is None else beta[t][:, None] * (v[t] - (state * k[t][..., None]).sum(1))
        state = state + k[t][..., None] * update[:, None]
        out.append((state * q[t][..., None]).sum(1))
    return torch.stack(out)


@pytest.mark.parametrize("trees", TREES)
@pytest.mark.parametrize("delta", [True, False])
def test_a_scan_equals_the_recurrence_of_each_path(trees, delta):
    segments = segments_of(trees)
    random = torch.Generator().manual_seed(0)
    q, k, v, g, beta = (
        torch.randn(2, WIDTH, *size, dtype=torch.float64, generator=random)
        for size in ((2, 6), (2, 6), (4, 5), (4,), (4,))
    )
    inputs = [normalize(q, dim=-1), normalize(k, dim=-1), v, -3 * g.abs(), *([beta.sigmoid()] if delta else [])]
    inputs = [x.requires_grad_() for x in inputs]
    weights = torch.randn(2 * WIDTH, 4, 5, dtype=torch.float64, generator=random)
    flat = [x.flatten(0, 1) for x in inputs] + [None] * (not delta)
    truth = torch.zeros_like(weights)
    for index, one in enumerate(segments):
        if count := one.stop - one.start:
            path = columns(segments, index)
            values = token_by_token(*(None if x is None else x[path] for x in flat))[-count:]
            truth = truth.index_copy(0, torch.tensor(path[-count:]), values)
    expected = torch.autograd.grad((truth * weights).sum(), inputs)
    for size in (16, 32):
        layout = chunks.chunks_of(segments, torch.Size((2, WIDTH)), torch.device("cpu"), size)
        out = scan(*inputs, *([] if delta else [None]), layout).flatten(0, 1)
        torch.testing.assert_close(out, truth, rtol=0, atol=1e-13)
        for mine, exact in zip(torch.autograd.grad((out * weights).sum(), inputs), expected, strict=True):
            torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12 * float(exact.abs().max()))


@contextmanager
def in_float64(monkeypatch):
    """Inside, transformers' casts to float32 are casts to float64."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(logprob, "HAS_ONEDNN", False)  # It has no products in float64.
        yield


def ids(count, seed):
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def rows():
    """A shared prompt of several chunks, a next turn after one of its answers, a prompt of one token, and two documents."""
    prompt, answers = ids(70, 1), [ids(n, n) for n in (1, 40, 13)]
    branches = [(prompt, answers), ([*prompt, *answers[2], 5], [ids(6, 2), ids(9, 3)]), ([7], [ids(5, 4), ids(2, 5)])]
    branches += [([], [ids(33, 6)]), ([], [ids(4, 7)])]
    return [Row(start, ends, [[1] * len(end) for end in ends]) for start, ends in branches]


def remembering(model):
    """Make decays slow, so that the state at the end of a long prompt matters."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(parameter, -4.0)
    return model


def gradients(logps, model):
    """Gradients of a random sum of log-probs."""
    random = torch.Generator().manual_seed(0)
    loss = sum((logp * torch.randn(len(logp), dtype=logp.dtype, generator=random)).sum() for logp in logps)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), grads, strict=True)]


def packed(model, examples):
    """Log-probs of every completion in packed prefix trees."""
    found = {}
    for batch in collate(examples, pad_token_id=0, layout=layout_for(model)):
        assert batch.num_tokens < batch.num_sequence_tokens
        found |= dict(zip(batch.origin, split_by_sequence(forward(model, batch).logp, batch), strict=True))
    return [found[i] for i in range(len(found))]


def largest(values):
    return max(float(value.detach().abs().max()) for value in values)


@pytest.mark.matrix
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_equals_each_sequence_alone_in_log_probs_and_gradients(name, monkeypatch):
    with in_float64(monkeypatch):
        model, examples = remembering(built(name, experts_implementation="eager").double()), rows()
        for layer in model.modules():
            if hasattr(layer, "decay_factors"):  # MiniMax computes these buffers in float32.
                layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
        with torch.enable_grad():
            truth = [alone.__wrapped__(model, row.prompt_ids, c) for row in examples for c in row.completions]
        expected, logps = gradients(truth, model), packed(model, examples)
        assert largest([a - b for a, b in zip(logps, truth, strict=True)]) < 1e-10
        gaps = [a - b for a, b in zip(gradients(logps, model), expected, strict=True)]
        assert largest(gaps) < 1e-10 * largest(expected)


@pytest.mark.matrix
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_layout_without_parents_is_told_from_a_right_one(name, monkeypatch):
    """The tests of this file, and the probe, see the states of every kind of layer."""
    model, examples = remembering(built(name)), rows()
    truth = [alone.__wrapped__(model, row.prompt_ids, c) for row in examples for c in row.completions]
    expected = gradients(truth, model)
    used = set(table.FAMILIES[table.replaced(model).split(".")[2]].values())
    makers = ["predecessors"] * (functions.convolution in used) + ["chunks_of"] * (used != {functions.convolution})
    for maker in makers:
        with monkeypatch.context() as patch:
            right = getattr(chunks, maker)

            def roots(segments, *rest, right=right):
                return right([one._replace(parent=-1) for one in segments], *rest)

            patch.setattr(chunks, maker, roots)
            gaps = [a - b for a, b in zip(gradients(packed(model, examples), model), expected, strict=True)]
            gap, most = largest(gaps), largest(expected)
            assert gap > 0.05 * most, maker
            assert _fault(model, layout_for(model), torch.device("cpu"))


def test_the_probe_refuses_wrong_gradients_of_right_log_probs(monkeypatch):
    model = built("qwen3.5", rms_norm_eps=1e-5)
    monkeypatch.setattr(trees, "scan", lambda q, k, *rest: scan(q, k.detach(), *rest))
    assert "gradients" in _fault(model, layout_for(model), torch.device("cpu"))
    model.requires_grad_(False)
    assert not _fault(model, layout_for(model), torch.device("cpu"))


def trained(method, name, layout, folder, tokenizer, monkeypatch, **settings):
    """Losses, gradient norms and tokens of two steps of a trainer, on packed prefix trees or on padded rows."""
    model = remembering(built(name, vocab_size=len(tokenizer), initializer_range=0.1))
    settings |= {"max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    with monkeypatch.context() as patch:
        if layout == "padded":
            patch.setattr(build, "probe_layout", lambda model, *rest: padded_layout(model))
        if method == "dpo":
            pairs = [{"prompt": f"Say {i}: " * 9, "chosen": " yes yes", "rejected": " no" * i} for i in range(1, 5)]
            args = DPOConfig(str(folder), report_to="none", bf16=False, save_strategy="no", **settings)
            data = Dataset.from_list(pairs)
            trainer = DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)
        else:
            trainer = {"sft": sft, "grpo": grpo}[method](folder, tokenizer, model, **settings)
    assert trainer.layout.kind == layout
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize(
    ("method", "name", "settings"),
    [
        ("sft", "qwen3.5", {"peft_config": LoraConfig(target_modules=["in_proj_qkv", "in_proj_a", "q_proj"])}),
        ("sft", "granite hybrid", {"gradient_checkpointing": True}),
        ("dpo", "lfm2", {}),
        ("grpo", "qwen3.5", {}),
        ("grpo", "minimax", {"beta": 0.1}),
    ],
)
def test_a_trainer_logs_the_same_losses_and_gradients_on_trees_and_on_padded_rows(
    method, name, settings, tmp_path, tiny_tokenizer, monkeypatch
):
    runs = [
        trained(method, name, layout, tmp_path / layout, tiny_tokenizer, monkeypatch, **settings)
        for layout in ("tree", "padded")
    ]
    assert len(runs[0]) == 2
    assert min(norm for _, norm in runs[0]) > 0
    for tree, padded in zip(*runs, strict=True):
        assert tree == pytest.approx(padded, rel=5e-4, abs=1e-5)


def test_functions_are_replaced_once_and_restored(caplog):
    model = built("qwen3 next")
    file = sys.modules[table.replaced(model)]
    table.uninstall(model)
    original = file.torch_chunk_gated_delta_rule
    with caplog.at_level("INFO"):
        assert table.install(model) and table.install(model)
    assert caplog.text.count("torch_chunk_gated_delta_rule") == 1
    assert file.torch_chunk_gated_delta_rule is not original
    table.uninstall(model)
    assert file.torch_chunk_gated_delta_rule is original
    assert not table.install(built("llama")) and not table.install(built("jamba"))


def test_a_layer_that_drops_the_arguments_of_trees_is_trained_on_padded_rows(monkeypatch):
    """As LFM2 in transformers 5.17, where a probe with small weights in bfloat16 did not find it."""
    model = built("lfm2", initializer_range=0.02).bfloat16()
    kind = type(model.model.layers[0].conv)

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
        return causal_conv1d_fn(hidden_states)  # noqa: F821

    monkeypatch.setattr(kind, "forward", forward)
    table._passes_arguments.cache_clear()
    try:
        assert not table.replaced(model) and not table.install(model)
        with raises(ModelError, "conv"):
            probe_cases(model)
        assert "without attention" in _fault(model, layout_for(model), torch.device("cpu"))
        assert "without attention" in native_is_exact(model)
    finally:
        table._passes_arguments.cache_clear()


def test_another_separation_of_packed_sequences_is_refused():
    model = built("lfm2")
    table.install(model)
    (batch,) = collate(rows(), pad_token_id=0, layout=layout_for(model))
    with raises(ModelError, "seq_idx"):
        model(batch.input_ids, forest=Forest(batch), seq_idx=torch.zeros_like(batch.input_ids))
    with raises(ModelError, "sp_size=2"):
        model(batch.input_ids, forest=Forest(batch, TokenSplit(None, [0, 1], 0, batch.input_ids.device)))
