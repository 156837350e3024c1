"""A server of another model, with other weights or flags: found before anything is trained, and no word about a good one."""

import math
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.checks import registry as core
from posttrain.checks import server as checks
from posttrain.checks.server import Parity, Probe, check_negative_control, check_parity, mean_gap, probe_sequences
from posttrain.extensions.server.checks import Needs, check_info, needs_of, probe_logprobs
from posttrain.models.forward import plain_logps
from posttrain.models.probe import rounded_otherwise
from tests.conftest import build_model
from tests.methods.helpers import grpo_args

SHAPE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
GOOD = {"model": "m", "vocab_size": 37, "max_model_len": 512, "max_num_seqs": 64, "weight_version": 0, **SHAPE}


def needs(**changed):
    base = {
        "model": "folder", "revision": None, "shape": SHAPE, "vocabulary": 37, "completion": 128, "at_once": 64,
        "temperature": 1.0, "truncated": False,
    }  # fmt: skip
    return Needs(**(base | changed))


def codes(info, **changed):
    return [f.code for f in check_info("http://x", info, needs(**changed))]


def test_a_server_that_fits_is_not_mentioned():
    assert codes(GOOD) == []
    assert codes({"model": "m"}) == []  # What it does not say is not held against it.


@pytest.mark.parametrize(
    ("lie", "changed", "code", "severity", "values"),
    [
        ({"hidden_size": 64}, {}, "PT-S001", "error", "hidden_size=64, but the trainer has hidden_size=32"),
        ({"architectures": ["Qwen2ForCausalLM"]}, {}, "PT-S001", "error", "Qwen2ForCausalLM"),
        ({"num_key_value_heads": 4}, {}, "PT-S001", "error", "num_key_value_heads=4"),
        ({"vocab_size": 36}, {}, "PT-S002", "error", "36 tokens, but the trainer's 37"),
        ({"revision": "a"}, {"revision": "b"}, "PT-S003", "warning", "revision a, but the trainer loaded b"),
        ({"max_model_len": 128}, {}, "PT-S010", "error", "max_model_len=128 .* max_completion_length=128"),
        ({"takes_no_weights": "it runs without x"}, {}, "PT-S012", "error", "without x"),
        ({"device_uuids": ["GPU-1"]}, {"devices": ("GPU-1", "GPU-2")}, "PT-S013", "error", "GPU-1"),
        ({"max_num_seqs": 8}, {"at_once": 64}, "PT-S014", "info", "8 completions at a time, but a generation has 64"),
        ({"quantization": "fp8"}, {}, "PT-S015", "warning", "fp8"),
        ({"device": "cpu", "chunked_prefill": True}, {}, "PT-S017", "error", "chunked prefill"),
    ],
)
def test_each_difference_is_found_with_both_values_and_what_to_do(lie, changed, code, severity, values):
    (found,) = check_info("http://x", GOOD | lie, needs(**changed))
    assert (found.code, found.severity, found.where) == (code, severity, "http://x")
    assert __import__("re").search(values, found.what)
    assert found.fix


def test_trap_s13_one_accelerator_on_both_sides_is_found_before_anybody_joins():
    assert codes(GOOD | {"device_uuids": ["GPU-1"]}, devices=("GPU-1",)) == ["PT-S013"]
    assert codes(GOOD | {"device_uuids": ["GPU-1"]}, devices=("GPU-2",)) == []


def test_a_larger_vocabulary_and_another_name_of_the_same_model_are_fine():
    assert codes(GOOD | {"vocab_size": 64, "model": "elsewhere"}) == []


def test_a_server_without_the_layers_that_an_adapter_repeats_is_not_fixed_by_its_base_model(tmp_path):
    config = LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    model = get_peft_model(build_model(37), config)
    (found,) = check_info("http://x", GOOD, needs_of(model, grpo_args(tmp_path)))
    assert (found.code, "save_merged" in found.fix) == ("PT-S001", True)


class Client:
    """Log-probs of one step, with or without the temperature in them."""

    base_url = "http://x"

    def __init__(self, raw):
        self.raw, self.asked = raw, 0

    def complete(self, prompts, *, temperature, **_):
        self.asked += 1
        logits = [2.0, 1.0, 0.5, 0.0, -1.0]
        scaled = [x / (1.0 if self.raw else temperature) for x in logits]
        norm = math.log(sum(map(math.exp, scaled)))
        at = {f"token_id:{i}": x - norm for i, x in enumerate(scaled)}
        return [{"token_ids": [0], "logprobs": {"token_logprobs": [scaled[0] - norm], "top_logprobs": [at]}}]


def test_trap_s27_log_probs_without_the_temperature_are_an_error_unless_it_is_one():
    (found,) = probe_logprobs(Client(raw=True), needs(temperature=0.7))
    assert (found.code, found.severity) == ("PT-S011", "error")
    assert "0.7" in found.what
    assert "--logprobs-mode processed_logprobs" in found.fix
    (found,) = probe_logprobs(Client(raw=True), needs(truncated=True))
    assert found.severity == "warning"
    assert list(probe_logprobs(Client(raw=False), needs(temperature=0.7))) == []
    (found,) = probe_logprobs(Client(raw=True), needs())  # Allowed: at 1, of the whole distribution, they are the same.
    assert found.severity == "warning"
    assert list(probe_logprobs(Client(raw=False), needs())) == []


def test_parity_has_a_limit_for_each_dtype_and_one_for_the_worst_percent():
    ours = [[-1.0] * 63] * 4

    def said(gap, dtype, computed="float32", **far):
        theirs = [[x + gap for x in line] for line in ours]
        for place, value in far.items():
            theirs[0][int(place[1:])] += value
        return check_parity("http://x", ours, theirs, dtype=dtype, version=12, computed=computed)

    assert said(0.019, "torch.float32") is None
    assert said(0.021, "torch.float32").code == "PT-S004"
    assert said(0.049, "float16") is None
    assert said(0.051, "float16").severity == "error"
    assert said(0.149, "bfloat16") is None
    assert said(0.151, "bfloat16") is not None
    assert said(0.085, "torch.float32", torch.bfloat16) is None  # The narrower of both sides sets the bounds.
    assert said(0.085, "torch.float32", torch.float32) is not None
    assert said(0.29, "fp8") is None
    assert said(0.31, None) is not None
    assert said(0.0, "float16", x0=0.9, x1=0.9) is None  # Two of 252 are below one percent.
    assert "99th percentile is 0.9" in said(0.0, "float16", x0=0.9, x1=0.9, x2=0.9).what
    assert said(0.0, "bfloat16", x0=0.9, x1=0.9, x2=0.9) is None
    assert said(float("nan"), "float32") is not None
    found = said(0.41, "bfloat16")
    assert "difference of log-probs over 252 tokens is 0.41 (limit 0.15)" in found.what and "version 12" in found.what


def test_tokens_that_rounding_sends_to_other_experts_are_no_lost_weights():
    """A push to a gpt-oss in bfloat16 that holds every weight had gaps of 0.10 on average and 1.4 at the 99th percentile."""
    ours = [[-1.0] * 63] * 4
    theirs = [[-0.92] * 63, [-0.92] * 63, [-0.92] * 63, [0.4] * 4 + [-0.92] * 59]
    kinds = {"dtype": "bfloat16", "computed": "bfloat16", "version": 2}
    assert "99th percentile is 1.4 (limit 1)" in check_parity("x", ours, theirs, **kinds).what
    assert check_parity("x", ours, theirs, **kinds, noise=0.137) is None
    assert "limit 1.2" in check_parity("x", ours, theirs, **kinds, noise=0.06).what
    lost = [[x + 0.4 for x in line] for line in ours]  # The base model without the adapter.
    assert "over 252 tokens is 0.4 (limit 0.274)" in check_parity("x", ours, lost, **kinds, noise=0.137).what


def test_what_training_changed_must_have_changed_on_both_sides():
    """A lost update is found while it is far below the limits of the dtypes."""
    ours, noise = [[-1.0, -2.0, -3.0]], [[1e-5, -1e-5, 1e-5]]
    theirs = [[a + b for a, b in zip(ours[0], noise[0], strict=True)]]
    later = [[-1.002, -1.999, -3.001]]
    arrived = [[a - b for a, b in zip(later[0], noise[0], strict=True)]]
    kinds = {"dtype": "float32", "version": 2, "first": (ours, theirs)}
    assert check_parity("x", later, arrived, **kinds) is None
    lost = check_parity("x", later, theirs, **kinds)
    assert lost.code == "PT-S004" and "0.00133" in lost.what
    # A movement within the noise of the first comparison proves nothing.
    assert check_parity("x", later, theirs, dtype="float32", version=2, first=(ours, [[-1.01, -2.01, -3.01]])) is None


def test_rounding_that_a_new_adapter_does_not_have_yet_is_no_loss():
    """Both sides are equal while the adapter is zero. After one step they differ by the rounding of merged weights."""

    def compared(noise, *moves):
        parity, kinds = Parity(1), {"dtype": "bfloat16", "version": 1}
        assert parity.compare(Probe([], [[0.0] * 64], "bfloat16", noise), "x", [[0.0] * 64], **kinds) is None
        probes = [Probe([], [[mine] * 64], "bfloat16", noise) for mine, _ in moves]
        return [
            parity.compare(p, "x", [[its] * 64], **kinds) is None for p, (_, its) in zip(probes, moves, strict=True)
        ]

    assert compared(0.01, (0.001, 0.021), (0.1, 0.12), (0.4, 0.43)) == [True, True, True]
    assert compared(0.01, (0.02, 0.0), (0.05, 0.0)) == [True, False]  # Found at the first movement beyond the noise.
    assert compared(0.01, (0.05, 0.1), (0.05, 0.05), (0.2, 0.16)) == [False, True, False]
    assert compared(0.0, (0.001, 0.0)) == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_rounding_noise_is_that_of_merged_weights(dtype):
    torch.manual_seed(0)
    model = build_model(37).to(dtype)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05 if "lora_B" in name else 0.0)
    sequences = probe_sequences(model.config.vocab_size, None)
    plain, state = plain_logps(adapted, sequences), torch.get_rng_state()
    with rounded_otherwise(adapted):
        noise = mean_gap(plain, plain_logps(adapted, sequences))
    assert torch.equal(torch.get_rng_state(), state) and plain_logps(adapted, sequences) == plain
    gap = mean_gap(plain, plain_logps(adapted.merge_and_unload(), sequences))
    assert 0 < gap < 3 * noise and noise < 10 * gap


def test_rounding_noise_is_that_of_tf32_where_float32_products_may_use_it():
    model = build_model(37).eval()
    sequences = probe_sequences(37, None)

    def noise():
        plain = plain_logps(model, sequences)
        with rounded_otherwise(model):
            return mean_gap(plain, plain_logps(model, sequences))

    exact, before = noise(), torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = (
            "tf32"  # transformers does so for tf32=True; allow_tf32 cannot be read then.
        )
        assert 100 * exact < noise() < 1e-2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_a_small_part_of_an_update_that_is_lost_is_found():
    """A permuted matrix or one old layer is a fifth of the movement."""
    ours, later = [[-1.0, -2.0, -3.0]], [[-1.002, -1.999, -3.001]]
    kinds = {"dtype": "float32", "version": 2, "first": (ours, ours)}
    assert check_parity("x", later, [[-1.00199, -1.999, -3.001]], **kinds) is None
    assert check_parity("x", later, [[-1.0012, -1.999, -3.001]], **kinds) is not None


def test_an_engine_that_differs_is_no_start_to_measure_movements_from():
    """Before the first push of a resumed run an engine has other weights: a later loss must be found all the same."""
    parity, kinds = Parity(None), {"dtype": "float32", "version": 1}
    assert parity.compare(Probe([[1, 2]], [[-1.0]], "float32"), "x", [[-3.0]], **kinds) is not None
    assert parity.compare(Probe([[1, 2]], [[-1.0]], "float32"), "x", [[-1.0]], **kinds) is None
    assert parity.compare(Probe([[1, 2]], [[-1.01]], "float32"), "x", [[-1.0]], **kinds) is not None


def test_comparisons_are_due_until_weights_moved_and_then_by_number_or_by_cost(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("posttrain.checks.server.time.monotonic", lambda: clock[0])

    def compared(every, moves):
        parity, result = Parity(every), []
        for push, value in enumerate(moves):
            clock[0] += 10.0
            if parity.due():
                with parity.timed():
                    clock[0] += 0.25
                    parity.compare(Probe([[1, 2]], [[value]], "float32"), "x", [[value]], dtype="float32", version=push)
                result.append(push)
        return result

    assert compared(0, [1.0, 1.0, 1.1, 1.2, 1.3]) == [0, 1, 2]
    assert compared(2, [1.0, 1.1, 1.2, 1.3, 1.4]) == [0, 1, 3]
    assert compared(None, [1.0, 1.1, *[1.2] * 6]) == [0, 1, 4, 7]  # 25 s after each, the first time at 30 s.


def test_a_push_that_changed_nothing_proves_nothing():
    assert check_negative_control("http://x", None).code == "PT-S005"
    differing = check_parity("http://x", [[0.0]], [[1.0]], dtype="float32", version=0)
    assert check_negative_control("http://x", differing) is None


def test_needs_are_read_from_model_and_config():
    args = types.SimpleNamespace(
        top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, temperature=0.9, max_completion_length=7,
        generation_batch_size=16, model_init_kwargs={"revision": "main"},
    )  # fmt: skip
    found = needs_of(build_model(37), args)
    assert dict(found.shape) == SHAPE
    assert (found.vocabulary, found.completion, found.at_once, found.revision) == (37, 7, 16, "main")
    assert not found.truncated
    args.top_k = 5
    assert needs_of(build_model(37), args).truncated


def test_probe_sequences_are_the_same_in_every_run_and_fit_the_context():
    assert checks.probe_sequences(37, None) == checks.probe_sequences(37, None)
    assert [len(s) for s in checks.probe_sequences(37, 20)] == [19] * 4  # A server generates one more.
    assert max(max(s) for s in checks.probe_sequences(37, None)) < 37


@pytest.mark.parametrize(
    ("window", "context", "last"),
    [(None, None, 64), (512, None, 576), (512, 540, 539), (16, None, 80), (4096, None, 64)],
)
def test_one_sequence_of_the_parity_probe_reaches_beyond_a_sliding_window(window, context, last):
    assert [len(s) for s in checks.probe_sequences(37, context, window)] == [64, 64, 64, last]


def test_all_codes_are_registered_with_their_page():
    pages = {code: check.page for code, check in core.load().items() if code.startswith("PT-S")}
    assert {c for c, page in pages.items() if page == "a"} >= {f"PT-S00{i}" for i in range(1, 6)}
    assert {c for c, page in pages.items() if page == "h"} >= {f"PT-S01{i}" for i in range(6)}
