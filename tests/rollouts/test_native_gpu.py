"""The graph path of the native engine, on a CPU: directly, and replayed from a recording as a CUDA graph would be."""

import threading
from dataclasses import replace

import pytest
import torch

from posttrain.errors import ConfigError, RolloutError, RolloutInterrupted
from posttrain.models.forward import sequence_logps
from posttrain.rollouts.hf import evaluating
from posttrain.rollouts.native import gpu
from posttrain.rollouts.native.attention import plugged_in
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.rollouts.native.gpu import Told
from posttrain.rollouts.native.graphs import BUCKETS, bucket_of
from posttrain.types import Request, Row, Sampling
from tests.conftest import build_model
from tests.models.test_forward import FAMILIES, family
from tests.rollouts.recorded import AskedTheHost, Graph, RecordedGraphs

PROMPTS = [Request([5, 6, 7], 4), Request([8] * 20, 3), Request([9, 10], 2)]
STOPS = (3, 4, 5, 6)
SHAPED = Sampling(
    20, seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, min_new_tokens=4,
    stop_token_ids=STOPS, logit_bias=((7, 2.0), (3, -1.0)), top_logps=3,
)  # fmt: skip
SAMPLINGS = {
    "plain": Sampling(30, seed=1, stop_token_ids=STOPS),
    "greedy": Sampling(30, temperature=0.0),
    "shaped": SHAPED,
    "n-grams": Sampling(20, seed=3, no_repeat_ngram=2, stop_token_ids=STOPS),
}


def engine(model=None, *, recorded=False, page=None, **options):
    made = NativeEngine(build_model(50) if model is None else model, pad_token_id=0, decode="graph", **options)
    if page is not None:
        made.decoder.size = page
        made.decoder.store = type(made.decoder.store)(gpu.Pages(1, page))
    if recorded:
        made.decoder.runner = RecordedGraphs()
    return made


def agree(model, rollouts, atol=1e-4, temperature=1.0):
    assert temperature == 1.0
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * len(r.token_ids)]) for r in rollouts]
    for r, truth in zip(rollouts, sequence_logps(model, rows), strict=True):
        torch.testing.assert_close(torch.tensor(r.logp), truth, atol=atol, rtol=0)


def same(found, expected):
    """Tokens, reasons and every kind of log-prob, to 1e-5."""
    for a, b in zip(found, expected, strict=True):
        assert (a.prompt_ids, a.token_ids, a.finish_reason) == (b.prompt_ids, b.token_ids, b.finish_reason)
        assert a.logp == pytest.approx(b.logp, abs=1e-5)
        assert (a.processed_logp is None) == (b.processed_logp is None)
        assert (a.processed_logp or []) == pytest.approx(b.processed_logp or [], abs=1e-5)
        assert (a.top_logps is None) == (b.top_logps is None)
        for ours, theirs in zip(a.top_logps or [], b.top_logps or [], strict=True):
            assert [i for i, _ in ours] == [i for i, _ in theirs]
            assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=1e-5)


# The same as the other path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"max_slots": 3}, {"kv_tokens": 72, "page": 8}, {"prefill_tokens": 4}], ids=str
)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_it_says_what_the_eager_path_says(name, options):
    model = build_model(50)
    expected = NativeEngine(model, pad_token_id=0, decode="eager").generate(PROMPTS, SAMPLINGS[name])
    same(engine(model, **options).generate(PROMPTS, SAMPLINGS[name]), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_its_own_forward_beyond_its_window(name):
    model = family(name, "eager")
    requests = [Request([*range(10, 34), 5, 6], 3), Request([*range(10, 34), 14], 2), Request([20] * 5, 1)]
    made = engine(model, max_slots=4, prefill_tokens=7, page=4)
    agree(model, made.generate(requests, Sampling(14, seed=0)))


def test_requests_with_settings_and_seeds_of_their_own_share_a_step():
    model = build_model(50)
    requests = [
        Request([5, 6], 2),
        Request([5, 6], 2, Sampling(6, temperature=0.0)),
        Request([7], 2, Sampling(9, seed=5, top_k=4, stop_token_ids=(1, 2, 3))),
        Request([7, 8, 9], 3, Sampling(12, seed=6, top_p=0.5, top_logps=2)),
        Request([7, 8, 9], 1, Sampling(12, seed=6, min_p=0.2, temperature=1.7)),
        Request([4] * 9, 2, Sampling(5, seed=7, repetition_penalty=2.0)),
    ]
    expected = NativeEngine(model, pad_token_id=0, decode="eager").generate(requests, Sampling(8, seed=1))
    found = engine(model).generate(requests, Sampling(8, seed=1))
    same(found, expected)
    alone = engine(model).generate(requests[2:3], Sampling(8, seed=99))
    assert [r.token_ids for r in alone] == [r.token_ids for r in found[4:6]]


def test_stop_strings_end_a_completion_and_nothing_follows_them(tiny_tokenizer):
    model = build_model(len(tiny_tokenizer))
    sampling = Sampling(40, seed=0, stop_strings=("e", "1"))
    expected = NativeEngine(model, pad_token_id=0, tokenizer=tiny_tokenizer, decode="eager").generate(PROMPTS, sampling)
    found = engine(model, tokenizer=tiny_tokenizer).generate(PROMPTS, sampling)
    assert {r.finish_reason for r in found} >= {"stop"}
    same(found, expected)


def test_a_guide_is_obeyed(tiny_tokenizer):
    pytest.importorskip("xgrammar")
    model = build_model(len(tiny_tokenizer))
    sampling = Sampling(12, seed=0, guide=("regex", "[0-9]{2,4}"), stop_token_ids=(2,))
    found = engine(model, tokenizer=tiny_tokenizer).generate(PROMPTS, sampling)
    texts = [tiny_tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in found]
    assert all(text.isdigit() and 2 <= len(text) <= 4 for text in texts)
    expected = NativeEngine(model, pad_token_id=0, tokenizer=tiny_tokenizer, decode="eager").generate(PROMPTS, sampling)
    same(found, expected)


def test_under_bf16_autocast_logps_stay_near_the_forward():
    model = build_model(50)
    with torch.autocast("cpu", torch.bfloat16):
        rollouts = engine(model, recorded=True).generate([Request([5, 6, 7], 4)], Sampling(8, seed=0))
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 8]) for r in rollouts]
    gaps = [(torch.tensor(r.logp) - t).abs() for r, t in zip(rollouts, sequence_logps(model, rows), strict=True)]
    assert torch.cat(gaps).mean() < 0.05


def test_bf16_weights_say_what_their_forward_says():
    model = build_model(50).bfloat16()
    rollouts = engine(model, recorded=True).generate(PROMPTS, Sampling(8, seed=0))
    rows = [Row(r.prompt_ids, [r.token_ids], [[1] * 8]) for r in rollouts]
    gaps = [(torch.tensor(r.logp) - t).abs() for r, t in zip(rollouts, sequence_logps(model, rows), strict=True)]
    assert torch.cat(gaps).mean() < 0.05


# Captured steps ------------------------------------------------------------------------------------------------------


def test_a_replayed_recording_says_what_direct_calls_say():
    model = build_model(50)
    for name in ("plain", "greedy", "shaped"):
        replayed = engine(model, recorded=True, max_slots=6)
        same(replayed.generate(PROMPTS, SAMPLINGS[name]), engine(model).generate(PROMPTS, SAMPLINGS[name]))
        runner = replayed.decoder.runner
        assert runner.replayed > len(runner.captured) > 1


def test_after_an_optimiser_step_in_place_nothing_is_captured_again_and_the_new_weights_are_read():
    model = build_model(50)
    made = engine(model, recorded=True)
    before = made.generate(PROMPTS, Sampling(8, seed=1))
    captured = list(made.decoder.runner.captured)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        model(torch.tensor([[5, 6, 7, 8]]), labels=torch.tensor([[5, 6, 7, 8]])).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        after = made.generate(PROMPTS, Sampling(8, seed=1))
        agree(model, after)
        assert made.decoder.runner.captured == captured
    assert [r.logp for r in before] != [r.logp for r in after]


def test_a_parameter_at_another_address_or_of_another_shape_is_captured_again():
    model = build_model(50)
    made = engine(model, recorded=True)
    made.generate(PROMPTS, Sampling(4, seed=1))
    first = len(made.decoder.runner.captured)
    with torch.no_grad():
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2)
    agree(model, made.generate(PROMPTS, Sampling(4, seed=1)))
    second = len(made.decoder.runner.captured)
    assert second == 2 * first
    model.resize_token_embeddings(64, mean_resizing=False)
    agree(model, made.generate(PROMPTS, Sampling(4, seed=1)))
    assert len(made.decoder.runner.captured) == 3 * first


def test_adapters_are_applied_unmerged_and_switching_them_off_is_noticed():
    from peft import LoraConfig, get_peft_model

    base = build_model(50)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    made = engine(model, recorded=True)
    adapted = made.generate(PROMPTS, Sampling(6, seed=0))
    agree(model, adapted)
    assert not any(getattr(m, "merged", False) is True for m in model.modules())
    with model.disable_adapter():
        plain = made.generate(PROMPTS, Sampling(6, seed=0))
        agree(model, plain)
    assert [r.logp for r in plain] != [r.logp for r in adapted]
    agree(model, made.generate(PROMPTS, Sampling(6, seed=0)))


def test_compiled_modules_are_called_as_they_are_written_and_stay_compiled():
    model = build_model(50)
    model.model.layers[0].compile(backend="eager")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    compiled = model.model.layers[0]._compiled_call_impl
    forward = model.model.layers[1].forward
    rollouts = engine(model, recorded=True).generate(PROMPTS, Sampling(6, seed=0))
    assert model.model.layers[0]._compiled_call_impl is compiled
    assert model.model.layers[1].forward is forward
    plain = build_model(50)
    same(rollouts, engine(plain).generate(PROMPTS, Sampling(6, seed=0)))
    whole = torch.compile(plain, backend="eager")
    same(engine(whole, recorded=True).generate(PROMPTS, Sampling(6, seed=0)), rollouts)


def test_checkpointing_and_training_mode_with_dropout_are_restored_and_idle():
    model = build_model(50, attention_dropout=0.5)
    model.train()
    model.gradient_checkpointing_enable()
    rollouts = engine(model, recorded=True).generate(PROMPTS, Sampling(6, seed=0))
    assert model.training and model.is_gradient_checkpointing
    assert all(m.training for m in model.modules())
    agree(model.eval(), rollouts)


def test_calls_of_other_sizes_and_settings_keep_what_was_captured():
    model = build_model(50)
    made = engine(model, recorded=True)
    made.generate(PROMPTS, Sampling(8, seed=1))
    first = list(made.decoder.runner.captured)
    made.generate([Request([5], 2)], Sampling(5, temperature=0.0))
    both = len(made.decoder.runner.captured)
    made.generate(PROMPTS, Sampling(8, seed=2))
    made.generate([Request([5], 2)], Sampling(5, temperature=0.0))
    assert made.decoder.runner.captured[: len(first)] == first
    assert len(made.decoder.runner.captured) == both
    assert made.decoder.runner.forgotten == 1  # Before anything was captured.


def test_buffers_grow_and_stay_at_their_addresses_otherwise():
    made = engine()
    made.generate([Request([5], 2)], Sampling(5, seed=0))
    names = ("rows", "tiles", "token", "prompt", "drawn", "prompt_pages", "suffix_pages", "uniform")

    def addresses():
        pool = [
            m.data_ptr() for m in (*made.decoder.store.pages.keys.values(), *made.decoder.store.pages.values.values())
        ]
        return [getattr(made.decoder, name).data_ptr() for name in names] + pool

    before = addresses()
    made.generate([Request([5, 6], 2)], Sampling(4, seed=1))
    assert addresses() == before
    made.generate(PROMPTS, Sampling(300, seed=1))
    assert addresses() != before
    before = addresses()
    made.generate([Request([5, 6], 2)], Sampling(4, seed=1))
    assert addresses() == before


def test_close_frees_the_memory_and_the_engine_works_again():
    made = engine(recorded=True)
    first = made.generate(PROMPTS, Sampling(5, seed=0))
    made.close()
    assert not made.decoder.store.pages.keys
    assert not made.decoder.runner.graphs
    same(made.generate(PROMPTS, Sampling(5, seed=0)), first)


def test_batch_sizes_waste_at_most_a_third():
    assert [bucket_of(n) for n in BUCKETS] == list(BUCKETS)
    assert all((bucket_of(n) - n) / bucket_of(n) < 0.34 for n in range(4, 2000))


# Nothing asks the host -----------------------------------------------------------------------------------------------


def test_the_recorder_refuses_a_step_that_asks_the_host():
    x = torch.ones(3)
    for step in (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x.any()), lambda: x.tolist()):
        with pytest.raises(AskedTheHost):
            Graph(step)


def test_a_step_is_read_only_when_the_next_one_runs(monkeypatch):
    """Every step is launched before the host looks at the one before; the last ones are read at the end."""
    events = []
    launch, read = gpu.Decoder.step, Told.read

    def step(self, *args, **kwargs):
        events.append("launch")
        told = launch(self, *args, **kwargs)
        told.event = type("Event", (), {"synchronize": lambda _: events.append("read"), "number": len(events)})()
        return told

    monkeypatch.setattr(gpu.Decoder, "step", step)
    monkeypatch.setattr(Told, "read", read)
    engine().generate([Request([5, 6], 4)], Sampling(6, seed=0))
    assert events == ["launch", "launch", "read", "launch", "read", "launch", "read", "launch", "read", "read"]


def test_one_step_copies_one_small_table_to_the_host(monkeypatch):
    sizes = []
    copy = gpu.Decoder._copy

    def counted(self, told):
        sizes.append((tuple(told.shape), told.dtype))
        return copy(self, told)

    monkeypatch.setattr(gpu.Decoder, "_copy", counted)
    engine().generate([Request([5, 6], 4)], Sampling(6, seed=0))
    assert sizes == [((4, 4), torch.int32)] * 6  # First tokens, then five steps: id, two log-probs, flags of four rows.


def test_all_tensors_of_a_step_are_on_the_device():
    """The whole step on the meta device, which has no values: it refuses tensors of the host beside its own, and questions."""
    with torch.device("meta"):
        model = build_model(50)
    made = NativeEngine(model, pad_token_id=0, decode="eager")
    decoder = gpu.Decoder(made, attention="plain")
    decoder.prepare(gpu.Need(9, 1, 1, 30, gpu.Features.of([SHAPED, Sampling(3, temperature=0.0)]), False))
    with evaluating(model), plugged_in(made.inner, decoder.store):
        decoder._step(4, (1, 1))
    kind = decoder.kinds[decoder.kind]
    assert kind.told.shape == (bucket_of(made.max_slots), 4 + 2 * 3)
    tensors = [kind.told, decoder.token, decoder.drawn, *decoder.store.pages.keys.values()]
    assert {t.device.type for t in tensors} == {"meta"}
    with pytest.raises(RuntimeError):
        kind.told.add_(torch.ones(kind.told.shape))
    with pytest.raises(RuntimeError):
        bool(kind.told.any())


# Memory, ends and faults ---------------------------------------------------------------------------------------------


def test_prompts_with_a_common_beginning_share_its_pages():
    model, seen = build_model(50), []
    made = engine(model, page=8)
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    system = list(range(10, 34))
    requests = [Request([*system, 40, 41, 42], 2), Request([*system, 43], 3), Request([*system, 44, 45], 1)]
    rollouts = made.generate(requests, Sampling(4, seed=0))
    agree(model, rollouts)
    assert seen[:5] == [(1, 27), (2, 2), (6, 1), (6, 1), (6, 1)]
    assert made.counts == {"prefilled": 27 + 1 + 2, "reused": 48, "steps": 3}


def test_a_long_prompt_is_computed_in_pieces_between_the_steps_of_others():
    model, seen = build_model(50), []
    made = engine(model, page=8, max_slots=2, prefill_tokens=8)
    model.model.register_forward_pre_hook(lambda m, a, kw: seen.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    short = Request([4], 1, Sampling(2, seed=3))
    agree(model, made.generate([Request([5, 6], 1), short, Request([7] * 30, 1)], Sampling(12, seed=0)))
    first = seen.index((1, 8))
    assert seen[first : first + 7] == [(1, 8), (1, 1), (1, 8), (1, 1), (1, 8), (1, 1), (1, 6)]


def test_a_short_budget_sets_completions_aside_and_loses_nothing(monkeypatch):
    aside, free = [], []
    model = build_model(50)
    made = engine(model, page=8, kv_tokens=160, prefill_tokens=16)
    original = type(made.decoder).step

    def step(self, *args, **kwargs):
        free.append(len(self.store.pages.free))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(made.decoder), "step", step)
    from posttrain.rollouts.native.gpu_run import GraphRun

    put = GraphRun._set_aside
    monkeypatch.setattr(GraphRun, "_set_aside", lambda self, line: (aside.append(line), put(self, line))[1])
    requests = [Request([5 + i] * 12, 3) for i in range(6)]
    rollouts = made.generate(requests, Sampling(60, seed=1, stop_token_ids=(3,)))
    assert aside and min(free) >= 0
    assert made.decoder.store.pages.count == 160 // 8 + 1
    assert len(made.decoder.store.pages.free) == 20  # All pages came back.
    same(rollouts, engine(model).generate(requests, Sampling(60, seed=1, stop_token_ids=(3,))))


def test_a_budget_below_one_completion_is_refused_with_the_bytes():
    """Pages of 64: 30 tokens take one, 100 take two; 192 tokens of 256 bytes are 49 kB."""
    with pytest.raises(
        RolloutError, match=r"kv_tokens=100 .*cannot hold one completion.*need 192 tokens in pages of 64"
    ):
        engine(kv_tokens=100).generate([Request([5] * 30, 2)], Sampling(100, seed=0))


def test_the_smallest_possible_budget_serves_everybody_in_turn():
    model = build_model(50)
    made = engine(model, page=8, kv_tokens=24 + 16, prefill_tokens=5)
    requests = [Request([5 + i] * 20, 2) for i in range(3)] + [Request([5] * 20 + [9], 1)]
    same(made.generate(requests, Sampling(16, seed=0)), engine(model).generate(requests, Sampling(16, seed=0)))


def test_a_thousand_requests_wait_their_turn():
    made = engine(build_model(50, num_hidden_layers=1), kv_tokens=64 * 40)
    rollouts = made.generate([Request([5 + i % 40, 7, 9 + i // 40], 1) for i in range(1000)], Sampling(2, seed=0))
    assert all(r.prompt_ids[0] == 5 + i % 40 and len(r.token_ids) == 2 for i, r in enumerate(rollouts))


def test_nan_weights_are_told_with_the_requests_and_leave_nothing_behind():
    model = build_model(50)
    made = engine(model)
    good = made.generate(PROMPTS, Sampling(3, seed=0))
    weight = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
        saved = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(RolloutError, match=r"NaN logits.*Requests: \[0\].*Check the weights"):
        made.generate([Request([5, 6])], Sampling(2, seed=0))
    with torch.no_grad():
        saved[0, 0] = build_model(50).model.layers[0].mlp.up_proj.weight[0, 0]
        assert torch.equal(weight, model.model.norm.weight)
    same(made.generate(PROMPTS, Sampling(3, seed=0)), good)


def test_nothing_left_to_draw_is_told():
    bias = tuple((token, -float("inf")) for token in range(50))
    with pytest.raises(RolloutError, match=r"no token is allowed .*Requests: \[1\]"):
        engine().generate([Request([5, 6]), Request([5], 1, Sampling(2, logit_bias=bias))], Sampling(4, seed=0))


def test_an_interrupt_from_another_thread_returns_what_was_finished():
    model = build_model(50)
    made, calls = engine(model, max_slots=2), []

    def hook(*_):
        calls.append(1)
        if len(calls) == 8:
            threading.Thread(target=made.interrupt).run()

    model.model.register_forward_pre_hook(hook)
    rollouts = made.generate([Request([5, 6], 2), Request([7], 2), Request([8], 1)], Sampling(5, seed=0))
    assert [r.finish_reason for r in rollouts] == ["length", "length", "abort", "abort", "abort"]
    assert [len(r.token_ids) for r in rollouts] == [5, 5, 3, 3, 0]
    assert len(made.generate([Request([5, 6], 1)], Sampling(5, seed=0))[0].token_ids) == 5


def test_ctrl_c_loses_no_finished_completion():
    model, calls = build_model(50), []

    def hook(*_):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt

    handle = model.model.register_forward_pre_hook(hook)
    made = engine(model, max_slots=2)
    with pytest.raises(RolloutInterrupted) as caught:
        made.generate([Request([5, 6], 2), Request([7], 2), Request([8], 1)], Sampling(5, seed=0))
    assert [len(r.token_ids) for r in caught.value.rollouts][:2] == [5, 5]
    handle.remove()
    agree(model, made.generate(PROMPTS, Sampling(5, seed=0)))


def test_what_cannot_be_captured_runs_uncaptured_with_a_warning_or_is_refused(caplog):
    model = build_model(50)

    class Failing(RecordedGraphs):
        def __call__(self, key, step, parked):
            raise RuntimeError("operation not permitted when stream is capturing")

    made = engine(model)
    made.decoder.runner, made.decoder.strict = Failing(), False
    same(made.generate(PROMPTS, Sampling(5, seed=0)), engine(model).generate(PROMPTS, Sampling(5, seed=0)))
    assert caplog.text.count("cannot be captured as a CUDA graph: operation not permitted") == 1
    made.decoder.runner, made.decoder.strict = Failing(), True
    with pytest.raises(RolloutError, match=r"cannot be captured.*decode='auto'"):
        made.generate(PROMPTS, Sampling(5, seed=0))


def test_the_way_is_chosen_by_name_and_a_cpu_is_eager_by_default():
    model = build_model(50)
    assert NativeEngine(model, pad_token_id=0).decoder is None
    assert NativeEngine(model, pad_token_id=0, decode="eager").decoder is None
    with pytest.raises(ConfigError, match="did you mean 'graph'"):
        NativeEngine(model, pad_token_id=0, decode="grahp")


@pytest.mark.slow
def test_the_real_model_says_the_same_on_both_paths(real_model=None):
    from pathlib import Path

    from transformers import AutoModelForCausalLM

    folder = Path.home() / ".cache/posttrain/SmolLM2-135M-Instruct"
    if not folder.exists():
        pytest.skip("the model is not here")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = [Request(list(range(100, 100 + n)), 4) for n in (130, 70)]
    sampling = Sampling(24, seed=0, stop_token_ids=(2,))
    expected = NativeEngine(model, pad_token_id=2, decode="eager").generate(requests, sampling)
    found = engine(model, recorded=True).generate(requests, sampling)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.logp == pytest.approx(b.logp, abs=1e-4)
    greedy = replace(sampling, temperature=0.0)
    first, second = (
        NativeEngine(model, pad_token_id=2, decode=d).generate(requests, greedy) for d in ("graph", "eager")
    )
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
