"""Every call that training on GPUs makes of vLLM exists with these arguments, in 0.27, 0.32 and the one that is installed."""

import importlib
import importlib.util
import json
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import posttrain.extensions.server as server
from posttrain.extensions.server.weight_sync import NcclSender
from posttrain.extensions.vllm.engine import EXTENSION, OLD_EXTENSION, VLLMEngine, vllm_refusal
from posttrain.types import Request, Sampling
from tests.conftest import build_model
from tests.extensions.vllm.vllm_signatures import FILE, TRANSFER, checked, module, read, signature

TABLE = json.loads(FILE.read_text(encoding="utf-8"))
INSTALLED = importlib.util.find_spec("vllm")
VERSIONS = [*TABLE, *(["installed"] if INSTALLED else [])]
LLM_FILE, WORKER = "vllm/entrypoints/llm.py", "posttrain.extensions.vllm.worker"


def fake_llm(row, model):
    """``vllm.LLM`` that takes vLLM's arguments alone, and writes token 7 whatever it is asked."""

    class LLM:
        def __init__(self, **options):
            known = [*row[f"{LLM_FILE}:LLM.__init__"], *row["vllm/engine/arg_utils.py:EngineArgs"]]
            unknown = set(options) - {name.strip("*=") for name in known}
            assert not unknown, f"neither vllm.LLM nor its EngineArgs have {unknown}"
            vocabulary = checked(row, "vllm/config/model.py:ModelConfig.get_vocab_size", lambda *_: 37)
            config = types.SimpleNamespace(
                max_model_len=64, dtype=torch.float32, get_vocab_size=lambda: vocabulary(self)
            )
            reset = checked(row, "vllm/v1/engine/llm_engine.py:LLMEngine.reset_encoder_cache", self._note("encoder"))
            self.llm_engine = types.SimpleNamespace(model_config=config, reset_encoder_cache=lambda: reset(self))
            self.options, self.calls = options, []
            for name in ("sleep", "wake_up", "reset_prefix_cache", "generate", "collective_rpc"):
                does = getattr(self, f"_{name}", None) or self._note(name)
                bound = checked(row, f"{LLM_FILE}:LLM.{name}", does)
                setattr(self, name, lambda *given, bound=bound, **named: bound(self, *given, **named))

        def _note(self, name):
            return lambda _, *given, **named: self.calls.append((name, *given, *named.values()))

        @staticmethod
        def _collective_rpc(self, method, args=()):
            worker = types.SimpleNamespace(
                vllm_config=types.SimpleNamespace(model_config=None),
                model_runner=types.SimpleNamespace(get_model=lambda: model),
            )
            return [method(worker, *args)]

        @staticmethod
        def _generate(self, prompts, settings, use_tqdm, lora_request=None):
            logps = [{7: types.SimpleNamespace(logprob=-1.0)}]
            out = types.SimpleNamespace(index=0, token_ids=[7], finish_reason="length", logprobs=logps)
            return [
                types.SimpleNamespace(
                    prompt_token_ids=p["prompt_token_ids"],
                    outputs=[out] * s["n"] if "n" in s else [out],
                    prompt_logprobs=[{token: logps[0][7]} for token in p["prompt_token_ids"]],
                )
                for p, s in zip(
                    prompts, settings if isinstance(settings, list) else [settings] * len(prompts), strict=True
                )
            ]

    return LLM


class Served(torch.nn.Module):
    """A model in vLLM's worker."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))

    def load_weights(self, pairs):
        found = dict(pairs)
        self.weight.data.copy_(found["weight"])
        return set(found)


@pytest.fixture(params=VERSIONS)
def row(request, monkeypatch):
    """Signatures of a version; ``import vllm`` gives a package that has them and nothing else."""
    given = request.param
    row = TABLE[given] if given in TABLE else read(Path(INSTALLED.submodule_search_locations[0]).parent)
    take = lambda place, does=lambda *_, **__: None: checked(row, place, does)  # noqa: E731
    sampling, reload = "vllm/sampling_params.py", "vllm/model_executor/model_loader/reload/layerwise.py"
    base = {name: type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)}) for name in (
        "WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")}  # fmt: skip
    register = take(f"{TRANSFER}/factory.py:WeightTransferEngineFactory.register_engine")
    factory = types.SimpleNamespace(_registry={}, register_engine=lambda *a, **k: register(None, *a, **k))
    here = types.SimpleNamespace(device_name="cuda")
    for name, value in (("is_cpu", False), ("is_sleep_mode_available", True)):
        ask = take(f"vllm/platforms/interface.py:Platform.{name}", lambda _, value=value: value)
        setattr(here, name, lambda ask=ask: ask(here))
    archs = take(
        "vllm/model_executor/models/registry.py:_ModelRegistry.get_supported_archs", lambda _: {"LlamaForCausalLM"}
    )
    params = module("vllm.sampling_params", StructuredOutputsParams=take(f"{sampling}:StructuredOutputsParams", dict))
    top = module(
        "vllm", __version__=given, __path__=[], sampling_params=params, LLM=fake_llm(row, Served()),
        SamplingParams=take(f"{sampling}:SamplingParams", dict),
        ModelRegistry=types.SimpleNamespace(get_supported_archs=lambda: archs(None)),
    )  # fmt: skip
    context = take("vllm/config/vllm.py:set_current_vllm_config", lambda _: __import__("contextlib").nullcontext())
    parts = {
        "vllm": top,
        "vllm.sampling_params": params,
        "vllm.platforms": module("vllm.platforms", current_platform=here),
        "vllm.config": module("vllm.config", set_current_vllm_config=context),
        "vllm.distributed.weight_transfer.base": module("base", **base),
        "vllm.distributed.weight_transfer.factory": module("factory", WeightTransferEngineFactory=factory),
        "vllm.model_executor.model_loader.reload": module(
            "reload", **{n: take(f"{reload}:{n}") for n in ("initialize_layerwise_reload", "finalize_layerwise_reload")}
        ),
    }
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.delitem(sys.modules, WORKER, raising=False)
    yield row
    sys.modules.pop(WORKER, None)
    vars(importlib.import_module("posttrain.extensions.vllm")).pop("worker", None)


def colocated(tmp_path, level, encoder=None):
    model = build_model(37)
    model.config.name_or_path = str(tmp_path)
    model.config.architectures = ["LlamaForCausalLM"]
    assert vllm_refusal(model) is None
    args = types.SimpleNamespace(
        vllm_tensor_parallel_size=1, vllm_enable_sleep_mode=level is not None, vllm_sleep_level=str(level), model_init_kwargs=None,
        vllm_max_model_length=64, vllm_gpu_memory_utilization=0.3, train_batch_size=4, steps_per_generation=2, num_iterations=1,
        gradient_accumulation_steps=2, do_eval=False, vllm_model_impl="vllm", trust_remote_code=False, adapter_sync="auto",
        max_images_per_row=None,
    )  # fmt: skip
    accelerator = types.SimpleNamespace(
        num_processes=2, process_index=0, mixed_precision="bf16", device=torch.device("cuda")
    )
    return VLLMEngine.for_training(model, args, accelerator)


@pytest.mark.parametrize("level", [None, 1, 2])
def test_vllm_in_the_trainers_process_takes_each_call_with_its_arguments(row, tmp_path, level):
    engine = colocated(tmp_path, level)
    assert engine.llm.options["distributed_executor_backend"] == "external_launcher"
    engine.load_weights([("weight", torch.ones(2, 3))], version=1)
    rules = {
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_new_tokens": 1,
        "stop_token_ids": (2,),
    }
    rules |= {"logit_bias": ((3, 1.0),), "guide": ("regex", "a+"), "stop_strings": ("a",), "top_logps": 2, "seed": 3}
    for sampling in (Sampling(2, seed=1), Sampling(2, temperature=0.0), Sampling(2, **rules)):
        (rollout, *_) = engine.generate([Request([5, 6], 2)], sampling)
        assert rollout.token_ids == [7]
    assert engine.score([[5, 6, 7]], [2]) == {"vllm": [[-1.0]]}
    engine.sleep()
    engine.load_weights([("weight", torch.ones(2, 3))], version=2)
    engine.generate([Request([5, 6])], Sampling(2, seed=1))
    engine.sleep()
    woken = [call for call in engine.llm.calls if call[0] in ("sleep", "wake_up")]
    expected = [("sleep", level), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), ("sleep", level)]
    assert woken == (expected if level else [])


def test_the_documented_path_of_the_worker_extension_names_its_class(row):
    for path in (EXTENSION, OLD_EXTENSION):
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name) is importlib.import_module(WORKER).WorkerExtension


def test_a_push_lets_vllm_forget_what_the_old_tower_said_of_a_picture(row, tmp_path):
    """Its cache of features outlives weights, unlike that of keys and values, which each push empties."""
    engine = colocated(tmp_path, None)
    engine.load_weights([("weight", torch.ones(2, 3))], version=1)
    assert [call[0] for call in engine.llm.calls] == ["reset_prefix_cache"]
    engine.encoder = object()
    engine.load_weights([("weight", torch.ones(2, 3))], version=2)
    assert [call[0] for call in engine.llm.calls[1:]] == ["reset_prefix_cache", "encoder"]


class Wire:
    """A communicator between two ends in this process: what one broadcasts the other finds, in order."""

    def __init__(self, row, log):
        self.sent, self.log = [], log
        place = "vllm/distributed/device_communicators/pynccl.py:PyNcclCommunicator"
        cast = checked(row, f"{place}.broadcast", lambda _, tensor, src: self.sent.append(tensor))
        end = checked(row, f"{place}.destroy", lambda _: log.append("destroyed"))
        self.broadcast, self.destroy = lambda *a, **k: cast(self, *a, **k), lambda: end(self)


class Worker:
    """A served model: what it was told of the transfer over HTTP, and the tensors that came over the wire."""

    group_port, sync_timeout = None, 5

    def __init__(self, row):
        self.row, self.init, self.updates = row, {}, []

    def call(self, method, path, body=None, timeout=None):
        assert f"{method} {path}" in self.row["routes"]
        if path == "/init_weight_transfer_engine":
            info = signature(self.row[f"{TRANSFER}/nccl_common.py:NCCLWeightTransferInitInfo"])
            self.init = info.bind(**body["init_info"]).arguments
        return {"world_size": 1}

    def send_part(self, **update):
        info = signature(self.row[f"{TRANSFER}/nccl_engine.py:NCCLWeightTransferUpdateInfo"])
        self.updates.append(info.bind(**update).arguments)

    def received(self, wire):
        """By name; the two sides must have agreed that buckets are packed."""
        found = {}
        for update, packed in zip(self.updates, wire.sent, strict=True):
            assert self.init.get("packed") or update.get("packed"), "the worker would wait for each tensor by itself"
            for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
                size = getattr(torch, dtype).itemsize * torch.Size(shape).numel()
                piece, packed = packed[:size], packed[size:]
                found[name] = piece.view(getattr(torch, dtype)).view(shape)
        return found


def test_a_push_over_nccl_arrives_with_what_both_sides_were_told(row, monkeypatch):
    log = []
    wire, worker = Wire(row, log), Worker(row)

    def produce(iterator, group, src, post_iter_func):
        log.append("packed")
        group.broadcast(
            torch.cat([post_iter_func(item).contiguous().view(-1).view(torch.uint8) for item in iterator]), src=src
        )

    common = {"trainer_init": checked(row, f"{TRANSFER}/nccl_common.py:trainer_init", lambda info: wire)}
    packed = checked(row, f"{TRANSFER}/packed_tensor.py:packed_nccl_broadcast_producer", produce)
    network = {
        name: checked(row, f"vllm/utils/network_utils.py:{name}", lambda: "127.0.0.1")
        for name in ("get_ip", "get_open_port")
    }
    info = checked(row, f"{TRANSFER}/nccl_common.py:NCCLWeightTransferInitInfo", dict)
    info.__signature__ = signature(row[f"{TRANSFER}/nccl_common.py:NCCLWeightTransferInitInfo"])
    parts = {
        "distributed.weight_transfer.nccl_common": common | {"NCCLWeightTransferInitInfo": info},
        "distributed.weight_transfer.packed_tensor": {"packed_nccl_broadcast_producer": packed},
        "utils.network_utils": network,
    }
    for name, content in parts.items():
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module(name, **content))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("waited"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
    sender = NcclSender(worker)
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.arange(5)}
    with ThreadPoolExecutor(1) as pool:  # As a pusher does.
        pool.submit(sender.send, [(name, weights[name]) for name in ("a", "b")]).result()
        pool.submit(sender.send, [("c", weights["c"])]).result()
    sender.close()
    # Other streams than that of the optimiser pack the weights.
    assert log == ["waited", "packed", "waited", "packed", "destroyed"]
    found = worker.received(wire)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("version", TABLE)
def test_the_server_has_every_address_that_the_client_asks(version):
    folder = Path(server.__file__).parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("client.py", "weight_sync.py", "engine.py"))
    asked = set(re.findall(r'"(GET|POST)",\s*"(/[\w/]+)', text))
    assert len(asked) > 10
    assert not {f"{method} {path}" for method, path in asked} - set(TABLE[version]["routes"])
