"""A rollout server in a thread, over the native engine, that can be told to lie; it speaks vLLM's endpoints."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import torch
import xxhash
from safetensors.torch import load as load_safetensors

from posttrain.errors import BadRequest
from posttrain.extensions.serve.engine import Job, score_choice
from posttrain.extensions.serve.host import Completions, choices_of
from posttrain.rollouts.native.engine import NativeEngine

VOCABULARY = 10**6  # Ids beyond the model's own are for the trainer to notice.


class Refused(Exception):
    def __init__(self, status, message, **detail):
        super().__init__(message)
        self.status, self.detail = status, {"message": message, "code": status} | detail


class StubServer:
    """Answers as ``posttrain serve`` does.

    ``lies`` is a dict that tests change while it runs: ``statuses`` (a list, used up one by one), ``truncate`` and ``hang_up``
    (how many answers), ``slow`` (seconds), ``edit`` (a function over the choices), ``deaf`` (weights are confirmed and not
    loaded), ``fail`` (path that gives 500), ``facts`` (a dict over the truth), ``renames`` (the version that is confirmed),
    ``drop_name`` (a weight that is said to be missing), ``sick`` (health gives 503).
    """

    def __init__(self, model, port=0):
        self.model = copy.deepcopy(model)
        self.engine = NativeEngine(self.model, pad_token_id=0)
        self.lies, self.version, self.valid, self.paused = {}, "default", True, False
        self.calls, self.lock, self.updating = [], threading.RLock(), False
        self.came, self.connections, self.dead = [], [], False
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # Its answers come in pieces, each of which would wait 40 ms.

            def setup(self):
                super().setup()
                stub.connections.append(self.connection)

            def log_message(self, *args):
                pass

            def handle_any(self):
                stub.handle(self)

            do_GET = do_POST = handle_any

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args):
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self):
        """No word more: listening ends, and every open answer breaks off."""
        self.dead = True
        self.http.shutdown()
        self.http.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    close = die

    def handle(self, handler):
        parts = urlsplit(handler.path)
        path, query = parts.path.strip("/"), parse_qs(parts.query)
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        asked = json.loads(body) if body else {}
        if path == "v1/completions" and asked.get("prompt_logprobs") is not None:
            path = "score"
        if path == "update_weights" and asked.get("update_info", {}).get("complete"):
            path = "complete"
        self.calls.append((handler.command, path))
        status, reply = 200, None
        try:
            reply = self.answer(path, asked | {name: values[0] for name, values in query.items()})
        except Refused as refused:
            status, reply = refused.status, {"error": refused.detail}
        except BadRequest as error:
            status, reply = 400, {"error": {"message": str(error)}}
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:
            status, reply = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
        data = json.dumps(reply).encode()
        if self._use("hang_up", path):
            handler.close_connection = True
            with contextlib.suppress(OSError):
                handler.connection.shutdown(2)
            return
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if self._use("truncate", path):
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            return
        handler.wfile.write(data)

    def _use(self, name, path):
        if path != "v1/completions":
            return False
        left = self.lies.get(name, 0)
        self.lies[name] = max(left - 1, 0)
        return left > 0

    def answer(self, path, asked):
        if self.lies.get("fail") == path:
            raise RuntimeError("out of memory")
        method = getattr(self, "on_" + path.replace("/", "_"), None)
        if method is None:
            raise Refused(404, "Not Found")
        return method(asked)

    # Endpoints

    def on_health(self, asked):
        if self.lies.get("sick"):
            raise Refused(503, self.lies["sick"])

    def on_v1_models(self, asked):
        length = self.model.config.max_position_embeddings
        return {"data": [{"id": "tiny", "root": "tiny", "parent": None, "max_model_len": length}]}

    def on_collective_rpc(self, asked):
        config = self.model.config
        facts = {
            "engine": "native",
            "architectures": [type(self.model).__name__],
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "vocab_size": config.vocab_size,
            "dtype": "float32",
            "transfer": "shared memory",
            "tells_versions": True,
        }
        return {"results": [facts | self.lies.get("facts", {})]}

    def on_weight_info(self, asked):
        return {"weight_version": self.version}

    def on_reset_prefix_cache(self, asked):
        return {"success": not self.lies.get("stuck")}

    def on_v1_completions(self, asked):
        if self.lies.get("statuses"):
            raise Refused(self.lies["statuses"].pop(0), "not now")
        time.sleep(self.lies.get("slow", 0))
        if not self.valid:
            raise Refused(409, "the weights are not whole")
        requests = Completions.model_validate(asked).requests(
            (), self.model.config.get_text_config().max_position_embeddings, VOCABULARY
        )
        with self.lock:
            rollouts = iter(self.engine.generate(requests, replace(requests[0].sampling, seed=None)))
        jobs = [Job(request, self.version) for request in requests]
        for job in jobs:
            job.rollouts.set_result([next(rollouts) for _ in range(job.request.n)])
        choices = [choice for job in jobs for choice in choices_of(job, asked["logprobs"])]
        choices = [choice | {"index": index} for index, choice in enumerate(choices)]
        return {"choices": self.lies["edit"](choices) if self.lies.get("edit") else choices}

    def on_score(self, asked):
        ids = asked["prompt"]
        with self.lock, torch.no_grad():
            return {"choices": [score_choice(self.model, ids, asked["prompt_logprobs"])]}

    def on_pause(self, asked):
        self.paused = True
        return {"status": "paused"}

    def on_resume(self, asked):
        self.paused = False
        return {"status": "resumed"}

    def on_update_weight_version(self, asked):
        self.version = asked["new_version"]
        return {"success": True}

    def on_start_weight_update(self, asked):
        self.updating, self.valid, self.came = True, False, []
        return {}

    def on_update_weights(self, asked):
        if not self.updating:
            raise Refused(409, "no update was begun")
        part = asked["update_info"]
        with open(part["path"], "rb") as file:
            data, checksum = file.read(), part["checksum"]
        if xxhash.xxh3_128(data).hexdigest() != checksum:
            raise Refused(409, "the checksum does not fit")
        tensors = load_safetensors(data)
        if unknown := [name for name in tensors if name not in self.model.state_dict()]:
            raise Refused(409, f"the server does not know {len(unknown)} weights: {', '.join(unknown[:3])}")
        if not self.lies.get("deaf"):
            with self.lock, torch.no_grad():
                own = self.model.state_dict()
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)
        self.came += tensors
        return {}

    def on_complete(self, asked):
        tied = set(self.model.all_tied_weights_keys)
        missing = sorted(set(self.model.state_dict()) - set(self.came) - tied)
        missing += [self.lies["drop_name"]] if self.lies.get("drop_name") else []
        if missing:
            raise Refused(409, f"the server still has old values of {len(missing)} weights: {', '.join(missing)}")
        return {}

    def on_finish_weight_update(self, asked):
        self.updating = False
        if asked.get("weight_version") is not None:
            self.valid, self.version = True, self.lies.get("renames") or asked["weight_version"]
        return {}


class Restarting:
    """A server that breaks off at its first call of a path once it is armed, and is started anew half a second later.

    ``make(port)`` makes a server with the weights that it has before it is given others.
    """

    def __init__(self, make, path):
        self.make, self.path, self.armed = make, path, False
        self.stubs = [make(0)]
        self.url, (first,) = self.stubs[0].url, self.stubs
        usual = first.answer

        def answer(path, asked):
            if self.armed and path == self.path:
                self.restart()
                raise ConnectionResetError
            return usual(path, asked)

        first.answer = answer

    def restart(self):
        if self.armed:
            self.armed = False
            threading.Thread(target=self._restart).start()

    def _restart(self):
        self.stubs[0].die()
        time.sleep(0.5)
        self.stubs.append(self.make(self.stubs[0].http.server_port))

    def close(self):
        for stub in self.stubs:
            stub.close()
