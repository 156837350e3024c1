"""What `vllm serve` answers, from a tiny model in a thread, and what a set-up that lies would answer."""

import json
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import torch

from posttrain.rollouts.vllm_worker import WeightReceiver
from tests.conftest import build_model


class Worker(WeightReceiver):
    """A worker of vLLM as far as its extension uses it."""

    def __init__(self, model):
        self.model = model
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)
        model.__class__ = type("Stubbed", (type(model),), {"load_weights": lambda _, pairs: self.load(pairs)})
        config = model.config
        config.architectures = ["LlamaForCausalLM"]
        whole = types.SimpleNamespace(
            hf_text_config=config, hf_config=config, get_vocab_size=lambda: config.vocab_size, max_model_len=512,
            dtype=torch.float32, quantization=None, revision=None, logprobs_mode="processed_logprobs", max_logprobs=20,
        )  # fmt: skip
        self.vllm_config = types.SimpleNamespace(
            model_config=whole,
            cache_config=types.SimpleNamespace(enable_prefix_caching=True),
            scheduler_config=types.SimpleNamespace(max_num_seqs=256, enable_chunked_prefill=False),
            device_config=types.SimpleNamespace(device_type="cpu"),
        )

    @torch.no_grad()
    def load(self, weights):
        own, seen = dict(self.model.named_parameters()), set()
        for name, tensor in weights:
            own[name].copy_(tensor)
            seen.add(name)
        return seen

    def reload_weights(self, weights_iterator):
        self.model.load_weights(weights_iterator)


class PlainStub:
    """Speaks vLLM's protocol.

    ``lies``: ``plain`` (no developer mode), ``bare`` (no extension), ``raw`` (log-probs without the temperature), ``edit`` (a
    function over completions), ``deaf`` (weights are confirmed and not loaded), ``stuck`` (keys and values are kept),
    ``facts`` (a dict over the truth), ``old`` (no token ids), ``length``.
    """

    def __init__(self, vocabulary=37, seed=0):
        self.worker = Worker(build_model(vocabulary, seed=seed))
        self.model, self.lies, self.version, self.paused = self.worker.model, {}, "default", False
        self.asked = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def handle_any(self):
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, reply = stub.answer(self.command, urlsplit(self.path).path, json.loads(data) if data else None)
                body = b"" if reply is None else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = handle_any

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, method, path, body):
        self.asked.append(path)
        developers = ("/weight_info", "/update_weight_version", "/collective_rpc", "/pause", "/resume")
        if self.lies.get("plain") and path in (*developers, "/reset_prefix_cache", "/get_world_size"):
            return 404, {"detail": "Not Found"}
        try:
            with self.lock:
                return 200, getattr(self, "on" + path.replace("/", "_"))(body)
        except AttributeError as error:
            return 404, {"detail": f"Not Found: {error}"}
        except Exception as error:
            return 500, {"error": {"message": f"{type(error).__name__}: {error}", "code": 500}}

    def on_health(self, body):
        return None

    def on_version(self, body):
        return {"version": "0.32.0"}

    def on_v1_models(self, body):
        card = {"id": "tiny", "root": "no/such-folder", "parent": None, "max_model_len": self.lies.get("length", 512)}
        return {"object": "list", "data": [card | {"owned_by": "vllm"}]}

    def on_weight_info(self, body):
        return {"weight_version": self.version}

    def on_update_weight_version(self, body):
        self.version = body["new_version"]
        return {"success": True}

    def on_get_world_size(self, body):
        return {"world_size": 1}

    def on_pause(self, body):
        self.paused = True
        return {"status": "paused"}

    def on_resume(self, body):
        self.paused = False
        return {"status": "resumed"}

    def on_reset_prefix_cache(self, body):
        return {"success": not self.lies.get("stuck")}

    def on_collective_rpc(self, body):
        name = body["method"]
        if self.lies.get("bare"):
            raise NotImplementedError(f"Method {name!r} is not implemented.")
        if name == "posttrain_end" and self.lies.get("deaf"):
            return {"results": [{"loaded": len(self.worker._posttrain_pairs), "missing": []}]}
        result = getattr(self.worker, name)(**body["kwargs"])
        return {"results": [result | self.lies.get("facts", {}) if name == "posttrain_facts" else result]}

    def on_v1_completions(self, body):
        assert not self.paused
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [c for i, p in enumerate(prompts) for c in self.complete(p, body, i)]
        choices = [c | {"index": i} for i, c in enumerate(choices)]
        return {"choices": self.lies["edit"](choices) if self.lies.get("edit") else choices}

    @torch.no_grad()
    def complete(self, prompt, body, place):
        if body.get("prompt_logprobs") is not None:
            scores = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            entries = [{str(t): {"logprob": float(scores[i, t]), "rank": 1}} for i, t in enumerate(prompt[1:])]
            return [{"token_ids": [0], "prompt_logprobs": [None, *entries]}]
        generator = torch.Generator().manual_seed(body.get("seed", 0) + 1000 * place)
        return [self.one(prompt, body, generator) for _ in range(body["n"])]

    def one(self, prompt, body, generator):
        ids, own, tops, reason = [], [], [], "length"
        temperature = body["temperature"] or 1.0
        while len(ids) < body["max_tokens"] and reason == "length":
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
            drawn = (logits / temperature).log_softmax(-1)
            token = int(
                drawn.argmax() if body["temperature"] == 0 else torch.multinomial(drawn.exp(), 1, generator=generator)
            )
            told = logits.log_softmax(-1) if self.lies.get("raw") else drawn
            best = told.topk(max(body["logprobs"], 1)).indices.tolist()
            tops.append({f"token_id:{i}": float(told[i]) for i in [token, *best]})
            own.append(float(told[token]))
            ids.append(token)
            reason = "stop" if token in body.get("stop_token_ids", ()) else "length"
        logprobs = {"token_logprobs": own, "top_logprobs": tops, "tokens": list(map(str, ids)), "text_offset": []}
        choice = {
            "text": "",
            "logprobs": logprobs,
            "finish_reason": reason,
            "token_ids": ids,
            "prompt_token_ids": prompt,
        }
        return choice | ({"token_ids": None} if self.lies.get("old") else {})
