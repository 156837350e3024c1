"""An engine that sleeps beside training never samples from weights that were not pushed, and never reads them from disk."""

import doctest
import types

import pytest
import torch

import posttrain.extensions.vllm.engine
from posttrain.errors import ConfigError, RolloutError, WeightSyncError
from posttrain.extensions.vllm.engine import Sleeper, VLLMEngine, choose_level
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.wordings import raises


class StubLLM:
    """What vLLM's object does, as far as memory and weights go; generating says which weights it holds."""

    def __init__(self):
        self.disk, self.weights, self.cache, self.calls = {"w": 0.0}, {"w": 0.0}, True, []

    def sleep(self, level):
        self.calls.append(f"sleep{level}")
        self.cache = False
        self.weights = dict(self.weights) if level == 1 else None

    def wake_up(self, tags=None):
        self.calls.append(f"wake{','.join(tags or ['all'])}")
        self.cache = self.cache or tags is None or "kv_cache" in tags
        if self.weights is None:
            self.weights = {"w": float("nan")}  # Memory without content.

    def load_weights(self, pairs):
        self.calls.append("load")
        self.weights = {name: float(tensor) for name, tensor in pairs}
        return set(self.weights) - self.deaf_to

    deaf_to = frozenset()

    def collective_rpc(self, function, args):
        model = Model(self)
        worker = types.SimpleNamespace(
            model_runner=types.SimpleNamespace(get_model=lambda: model),
            reload_weights=lambda weights_iterator: model.load_weights(weights_iterator),
        )
        return [function(worker, *args)]

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def generate(self, prompts, settings, use_tqdm, lora_request=None):
        assert self.cache and self.weights is not None
        self.calls.append("generate")
        token = int(self.weights["w"])
        out = types.SimpleNamespace(
            index=0, token_ids=[token], finish_reason="length", logprobs=[{9: logprob(-0.1), token: logprob(-2.0)}]
        )
        return [types.SimpleNamespace(prompt_token_ids=p["prompt_token_ids"], outputs=[out]) for p in prompts]


class Model(torch.nn.Module):
    """The model in vLLM's worker."""

    def __init__(self, llm):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.llm = llm

    def load_weights(self, pairs):
        return self.llm.load_weights(pairs)


def logprob(value):
    return types.SimpleNamespace(logprob=value, rank=1)


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch):
    def reload(worker, pairs):
        model = worker.model_runner.get_model()
        return sorted({name for name, _ in model.named_parameters()} - model.load_weights(pairs))

    fake = types.SimpleNamespace(SamplingParams=lambda **settings: settings, reload=reload)
    monkeypatch.setattr("posttrain.extensions.vllm.engine.require", lambda name, purpose: fake)


def engine(level):
    made = VLLMEngine(StubLLM(), context=64, vocabulary=37, dtype="float32", sleep_level=level)
    made.sleeper.valid = False
    return made


def push(made, value):
    made.load_weights([("w", torch.tensor(float(value)))], version=value)


def sampled(made):
    (rollout,) = made.generate([Request([5])], Sampling(1, seed=0))
    return rollout.token_ids[0]


@pytest.mark.parametrize("level", [None, 1, 2])
def test_trap_s1_generate_train_generate_uses_what_was_pushed_and_never_the_disk(level):
    made = engine(level)
    for value in (3, 4, 5):
        push(made, value)
        assert sampled(made) == sampled(made) == value
        made.sleep()
    assert made.llm.calls.count("load") == 3
    if level == 2:
        assert made.llm.calls[:6] == ["load", "reset", "generate", "generate", "sleep2", "wakeweights"]
        assert made.llm.calls[6:9] == ["load", "reset", "wakekv_cache"]


def test_from_the_deeper_sleep_only_a_push_leads_to_generation_and_from_the_other_waking_does():
    light, deep = engine(1), engine(2)
    for made in (light, deep):
        push(made, 3)
        made.sleep()
    assert sampled(light) == 3
    assert not light.needs_weights()
    assert deep.needs_weights()
    with raises(WeightSyncError, "asleep2"):
        sampled(deep)
    push(deep, 4)
    assert sampled(deep) == 4


def test_before_the_first_push_a_trainer_s_engine_does_not_generate():
    with raises(WeightSyncError):
        sampled(engine(None))


def test_resting_twice_sleeps_once_and_an_engine_without_a_level_never():
    made = engine(1)
    push(made, 3)
    made.sleep()
    made.sleep()
    assert made.llm.calls.count("sleep1") == 1
    assert Sleeper(StubLLM(), None).sleep() is None
    assert Sleeper(StubLLM(), None).state == "awake"


def test_a_push_that_breaks_off_leaves_no_weights_to_sample_from():
    made = engine(None)
    push(made, 3)

    def broken():
        yield "w", torch.tensor(4.0)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        made.load_weights(broken(), 4)
    with pytest.raises(WeightSyncError):
        sampled(made)


def test_weights_that_nothing_came_for_are_told_and_not_sampled_from():
    made = engine(None)
    made.llm.deaf_to = {"w"}
    with raises(WeightSyncError, "1"):
        push(made, 3)
    with raises(WeightSyncError):
        sampled(made)


def test_a_build_that_cannot_sleep_is_refused_before_a_model_is_loaded(monkeypatch):
    platform = types.SimpleNamespace(is_sleep_mode_available=lambda: False, device_name="cpu")
    fake = types.SimpleNamespace(__version__="0.32.0", current_platform=platform, LLM=None)
    monkeypatch.setattr("posttrain.extensions.vllm.engine.require", lambda name, purpose: fake)
    with raises(ConfigError, "vllm_enable_sleep_mode=True", "0.32.0"):
        VLLMEngine.create("folder", sleep_level=1)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_on_a_cpu_prompts_are_read_whole_so_that_seeds_hold(monkeypatch, on_cpu):
    """vLLM's CPU build ends with ``CPU Generator does not use offset`` where a request with a seed is read in pieces."""
    given = {}

    def llm(**options):
        given.update(options)
        raise StopIteration

    fake = types.SimpleNamespace(current_platform=types.SimpleNamespace(is_cpu=lambda: on_cpu), LLM=llm)
    monkeypatch.setattr("posttrain.extensions.vllm.engine.require", lambda name, purpose: fake)
    with pytest.raises(StopIteration):
        VLLMEngine.create("folder", max_model_len=8192)
    assert given.get("enable_chunked_prefill") is (False if on_cpu else None)
    # Without pieces a step must hold the whole context; on a GPU a step that held so much would take the memory of others.
    assert given.get("max_num_batched_tokens") == (None if on_cpu else 4096)
    own = {"max_num_batched_tokens": 77, "enable_chunked_prefill": True}
    with pytest.raises(StopIteration):
        VLLMEngine.create("folder", **own)
    assert given | own == given  # What a caller says holds.


def test_the_level_follows_how_often_a_push_is_used_and_what_fits():
    assert doctest.testmod(posttrain.extensions.vllm.engine).failed == 0
    roomy = {"model_bytes": 100, "ranks": 2, "free_bytes": 240}
    assert choose_level("auto", generations_per_push=3.0, **roomy) == 1
    assert choose_level("auto", generations_per_push=3.0, **(roomy | {"free_bytes": 239})) == 2
    assert choose_level("auto", generations_per_push=1.0, **roomy) == 2
    assert choose_level("1", generations_per_push=1.0, **roomy) == 1


def test_the_log_prob_is_of_the_sampled_token_whatever_comes_first():
    made = engine(None)
    push(made, 7)
    (rollout,) = made.generate([Request([5])], Sampling(1))
    assert rollout.logp == [-2.0]
    assert rollout.processed_logp is None
    (rollout,) = made.generate([Request([5])], Sampling(1, top_k=3))
    assert rollout.processed_logp == [-2.0]


def test_the_most_likely_tokens_come_by_rank_whichever_was_sampled():
    """vLLM lists the sampled token first, then the k most likely ones: one more than k where it is none of them."""
    likely = {3: logprob(-0.5), 5: logprob(-1.0)}
    at = [{9: logprob(-4.0)} | likely, {5: likely[5]} | likely]
    completion = types.SimpleNamespace(token_ids=[9, 5], logprobs=at, finish_reason="length")
    rollout = engine(None)._rollout(Request([1]), completion, Sampling(2, top_logps=2))
    assert rollout.logp == [-4.0, -1.0]
    assert rollout.top_logps == [[(3, -0.5), (5, -1.0)]] * 2


def test_what_vllm_cannot_do_is_said_before_it_is_asked():
    made = engine(None)
    push(made, 3)
    with pytest.raises(ConfigError, match="no_repeat_ngram=2"):
        made.generate([Request([5])], Sampling(1, no_repeat_ngram=2))
    with raises(RolloutError):
        made.generate([Request([])], Sampling(1))


def test_processes_that_make_no_whole_engines_and_models_without_a_name_are_refused():
    model = build_model(37)
    accelerator = types.SimpleNamespace(num_processes=6, mixed_precision="no", process_index=0)
    args = types.SimpleNamespace(vllm_tensor_parallel_size=4)
    with raises(ConfigError, "6", "1", "2", "3"):
        VLLMEngine.for_training(model, args, accelerator)
    args.vllm_tensor_parallel_size = 1
    model.config.name_or_path = ""
    with raises(ConfigError):
        VLLMEngine.for_training(model, args, accelerator)
    model.model.layers[0].mlp.up_proj = type("Linear8bitLt", (torch.nn.Identity,), {})()
    model.config.name_or_path = "here"
    with raises(ConfigError, "8"):
        from posttrain.extensions.vllm.engine import _quantisation

        _quantisation(model)
