"""Every way of decoding attention says what a loop over rows says; the kernel runs in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from posttrain.rollouts.native import paged_attention as ways
from posttrain.rollouts.native.pages import Rule, StepView

TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(scope="module", autouse=TRITON)
def interpreted():
    """The kernel is imported while the variable says that it is interpreted."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("posttrain.rollouts.native.paged_kernel", None)
    yield
    patch.undo()
    sys.modules.pop("posttrain.rollouts.native.paged_kernel", None)


# Query heads, KV heads, head size, prompt lengths of the groups, rows of each, suffix lengths (the new token included).
SHAPES = {
    "one row": (4, 2, 16, [5], [1], [1]),
    "first token": (4, 2, 64, [16, 3], [3, 2], [1, 1, 1, 1, 1]),
    "odd lengths": (6, 2, 64, [17, 33, 1], [4, 1, 2], [3, 16, 17, 31, 1, 5, 40]),
    "no grouping": (4, 4, 32, [20, 9], [2, 3], [2, 9, 1, 8, 25]),
    "qwen 0.5b": (14, 2, 64, [70], [9], [1, 5, 33, 2, 64, 65, 9, 3, 1]),
    "qwen 1.5b": (12, 2, 128, [40, 15], [8, 1], [7, 1, 12, 30, 8, 2, 19, 5, 16]),
    "one kv head": (8, 1, 16, [31], [5], [1, 2, 3, 4, 40]),
}


def case(name, dtype=torch.float32, page=16, padding=1):
    heads, kv, size, prompts, counts, suffix = SHAPES[name]
    g = torch.Generator().manual_seed(sum(map(ord, name)))
    b = len(suffix) + padding
    widths = [max(-(-n // page) for n in prompts) + 1, max(-(-n // page) for n in suffix) + 1]
    order = (torch.randperm(len(prompts) * widths[0] + b * widths[1], generator=g) + 1).tolist()
    taken = iter(order)
    prompt_pages = torch.zeros(b, widths[0], dtype=torch.long)
    suffix_pages = torch.zeros(b, widths[1], dtype=torch.long)
    prompt, tiles, row = torch.zeros(b, dtype=torch.int32), [], 0
    tile = max(1, 64 // (heads // kv))
    for length, count in zip(prompts, counts, strict=True):
        pages = [next(taken) for _ in range(-(-length // page))]
        for i in range(row, row + count):
            prompt_pages[i, : len(pages)], prompt[i] = torch.tensor(pages), length
        members = list(range(row, row + count))
        tiles += [members[i : i + tile] for i in range(0, count, tile)]
        row += count
    lengths = torch.tensor([*suffix, *[1] * padding], dtype=torch.int32)
    for i, length in enumerate(suffix):
        pages = [next(taken) for _ in range(-(-length // page))]
        suffix_pages[i, : len(pages)] = torch.tensor(pages)
    grid = [members + [-1] * (tile - len(members)) for members in tiles]
    grid += [[-1] * tile] * (b - len(grid))
    tokens = (len(order) + 1) * page
    keys, values = (torch.randn(kv, tokens, size, generator=g).to(dtype) for _ in range(2))
    query = torch.randn(b, heads, size, generator=g).to(dtype)
    at = lengths.long() - 1
    places = suffix_pages.gather(1, (at // page)[:, None]).squeeze(1) * page + at % page
    view = StepView(
        places, prompt_pages, prompt, suffix_pages, lengths, torch.tensor(grid, dtype=torch.int32), page, ways.plain
    )
    return query, keys, values, view


def by_rows(query, keys, values, view, rule):
    """Each row and head alone, in float64, from its own list of tokens."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    page, group = view.size, query.shape[1] // keys.shape[0]
    for row in range(len(query)):
        n, own = int(view.prompt[row]), int(view.suffix[row])
        places = [int(view.prompt_pages[row, i // page]) * page + i % page for i in range(n)]
        places += [int(view.suffix_pages[row, i // page]) * page + i % page for i in range(own)]
        if rule.window is not None:
            places = places[-rule.window :]
        for head in range(query.shape[1]):
            k, v = (m[head // group, places].double() for m in (keys, values))
            scores = k @ query[row, head].double() * rule.scale
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            out[row, head] = scores.softmax(0) @ v
    return out


def check(name, shape, rule, dtype=torch.float32, page=16):
    if name == "triton" and not TRITON:
        pytest.skip("triton is not installed")
    query, keys, values, view = case(shape, dtype, page)
    found = ways.ATTENTIONS[name](query, keys, values, view, rule)
    assert found.dtype == dtype
    assert found.shape == query.shape
    truth = by_rows(query, keys, values, view, rule)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    real = slice(0, len(SHAPES[shape][5]))
    torch.testing.assert_close(found.double()[real], truth[real], atol=tolerance, rtol=tolerance)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plain", "sdpa", "flex", "triton"])
def test_every_way_equals_a_loop_over_rows(name, shape):
    check(name, shape, Rule(0.2))


@pytest.mark.parametrize("shape", ["odd lengths", "qwen 0.5b", "qwen 1.5b"])
@pytest.mark.parametrize("name", ["plain", "sdpa", "flex", "triton"])
def test_every_way_equals_a_loop_over_rows_in_bf16(name, shape):
    check(name, shape, Rule(0.1), torch.bfloat16)


@pytest.mark.parametrize("window", [1, 7, 20])
@pytest.mark.parametrize("name", ["plain", "sdpa", "flex", "triton"])
def test_every_way_keeps_to_a_window(name, window):
    check(name, "odd lengths", Rule(0.2, window=window))


@pytest.mark.parametrize("name", ["plain", "flex", "triton"])
def test_ways_that_claim_it_squeeze_scores(name):
    check(name, "odd lengths", Rule(0.5, softcap=2.0))
    check(name, "odd lengths", Rule(0.5, softcap=2.0, window=9))


@pytest.mark.parametrize("page", [4, 64])
def test_the_kernel_takes_other_pages(page):
    check("triton", "odd lengths", Rule(0.2), page=page)


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize("programs", [1, 10_000])
def test_the_kernel_says_the_same_in_one_stretch_and_in_many(programs, monkeypatch):
    from posttrain.rollouts.native import paged_kernel

    monkeypatch.setattr(paged_kernel, "PROGRAMS", programs)
    check("triton", "qwen 0.5b", Rule(0.2))


@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize("name", ["gemma2", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_whole_call_on_the_kernel_says_what_the_model_says(name, monkeypatch):
    from posttrain.rollouts.native import paged_kernel
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.types import Request, Sampling
    from tests.models.test_forward import family
    from tests.rollouts.test_native_gpu import agree

    monkeypatch.setattr(paged_kernel, "PROGRAMS", 4)  # Every program takes the interpreter a while.
    model = family(name, "eager")
    made = NativeEngine(model, pad_token_id=0, decode="graph", max_slots=3)
    made.decoder.attention = "triton"
    agree(model, made.generate([Request([5, 6, 7, 8, 9, 10, 11], 2), Request([9, 10], 1)], Sampling(5, seed=0)))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from posttrain.rollouts.native import paged_kernel
dtype, group, rows, size, exact = {case}
types = {{"query": "*" + dtype, "keys": "*" + dtype, "values": "*" + dtype, "out": "*fp32", "most": "*fp32",
         "total": "*fp32", "tiles": "*i32", "pages": "*i64", "lengths": "*i32", "origins": "*i32", "now": "*i32",
         "scale": "fp32", "softcap": "fp32"}}
types |= dict.fromkeys(("window", "heads", "width", "tokens", "parts", "first_part", "span_parts"), "i32")
fixed = {{"GROUP": group, "ROWS": rows, "SIZE": size, "PAGE": 64, "M": max(16, triton.next_power_of_2(rows * group)),
         "N": 64, "D": size, "CAPPED": False, "WINDOWED": False, "EXACT": exact}}
target = GPUTarget("cuda", 90, 32)
source = ASTSource(fn=paged_kernel._part, signature=types | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
part = triton.compile(source, target=target)
assert part.metadata.shared <= 227 * 1024, part.metadata.shared
assert exact or "wgmma" in part.asm["ptx"] or "mma.sync" in part.asm["ptx"]
types = {{"parts_out": "*fp32", "most": "*fp32", "total": "*fp32", "out": "*" + dtype, "parts": "i32"}}
fixed = {{"SIZE": size, "D": size, "PARTS": 16}}
source = ASTSource(fn=paged_kernel._combine, signature=types | dict.fromkeys(fixed, "constexpr"), constexprs=fixed)
assert triton.compile(source, target=target).asm["cubin"]
"""


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="triton is not installed")
@pytest.mark.parametrize(
    "case", [("bf16", 7, 9, 64, False), ("bf16", 6, 1, 128, False), ("fp32", 3, 21, 64, True)], ids=str
)
def test_the_kernel_compiles_for_a_hopper_gpu_and_uses_its_tensor_cores(case, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILE.format(case=case)], check=True, env=environment, timeout=280)


@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_a_whole_call_on_another_way_says_what_the_model_says(name):
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.types import Request, Sampling
    from tests.conftest import build_model
    from tests.rollouts.test_native_gpu import agree

    model = build_model(50)
    made = NativeEngine(model, pad_token_id=0, decode="graph")
    made.decoder.attention = name
    agree(model, made.generate([Request([5, 6, 7], 3), Request([9, 10], 2)], Sampling(7, seed=0)))


# Choice --------------------------------------------------------------------------------------------------------------


def test_the_fastest_way_that_agrees_is_taken_and_told(caplog):
    caplog.set_level("INFO")
    outputs = {"plain": torch.ones(3), "flex": torch.ones(3) + 1e-6, "triton": torch.zeros(3)}
    seconds = {"plain": 3e-5, "flex": 1e-5, "triton": 1e-6}
    called = []

    def run(name):
        called.append(name)
        if name == "sdpa":
            raise RuntimeError("no kernel image")
        return outputs[name]

    def clock(function):
        function()
        return seconds[called[-1]]

    assert ways.measured(["triton", "flex", "sdpa", "plain"], run, clock=clock) == "flex"
    assert "'triton' differs from the plain one by 1" in caplog.text
    assert "'sdpa' does not run here" in caplog.text
    assert "Decoding attention: flex. One layer's step: flex 10 us, plain 30 us." in caplog.text


def test_where_there_is_no_choice_nothing_is_measured():
    assert ways.measured(["plain"], None, clock=None) == "plain"
    assert ways.possible(torch.device("cpu"), squeezes=False, size=64, value_size=64) == ["plain"]


def test_what_can_serve_a_model_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ways, "_has_triton", lambda: True)
    cuda = torch.device("cuda")
    assert ways.possible(cuda, squeezes=False, size=64, value_size=64) == ["triton", "flex", "sdpa", "plain"]
    assert ways.possible(cuda, squeezes=True, size=256, value_size=256) == ["triton", "flex", "plain"]
    assert ways.possible(cuda, squeezes=False, size=80, value_size=80) == ["triton", "sdpa", "plain"]
    assert ways.possible(cuda, squeezes=False, size=64, value_size=32) == ["sdpa", "plain"]


def test_measuring_runs_every_way_on_the_models_own_shapes():
    from posttrain.rollouts.native.engine import NativeEngine
    from posttrain.types import Request, Sampling
    from tests.conftest import build_model

    made = NativeEngine(build_model(50), pad_token_id=0, decode="graph")
    made.generate([Request([5, 6, 7], 3)], Sampling(4, seed=0))
    assert made.decoder.measure_attention(["sdpa", "flex", "plain"], 6) in ("sdpa", "flex", "plain")


def test_a_stopwatch_counts_the_calls_after_three_warm_ones():
    calls = []
    seconds = ways.stopwatch(torch.device("cpu"), repeats=4)(lambda: calls.append(1))
    assert len(calls) == 7
    assert 0 <= seconds < 1


def test_a_compiled_way_may_be_compiled_for_every_batch_size():
    seen = []

    def function(x):
        seen.append(torch._dynamo.config.recompile_limit)
        return x + 1

    before = torch._dynamo.config.recompile_limit
    with torch.compiler.set_stance("force_eager"):
        assert ways._compiled(function)(torch.ones(1)) == 2
    assert ways._compiled(function) is ways._compiled(function)
    assert seen == [ways.COMPILATIONS]
    assert torch._dynamo.config.recompile_limit == before
