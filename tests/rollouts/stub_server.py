"""A rollout server in a thread, over the native engine, that can be told to lie."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import xxhash
from safetensors.torch import load as load_safetensors

from posttrain.models.forward import sequence_logps
from posttrain.rollouts.native.engine import NativeEngine
from posttrain.types import Request, Row, Sampling

ONE_AT_A_TIME = threading.RLock()  # The native engine plugs into a table of transformers: one run a process.


class Refused(Exception):
    def __init__(self, status, message, **detail):
        super().__init__(message)
        self.status, self.detail = status, {"message": message} | detail


class StubServer:
    """Speaks the protocol of ``posttrain serve``.

    ``lies`` is a dict that tests change while it runs: ``statuses`` (a list, used up one by one), ``truncate`` and ``hang_up``
    (how many answers), ``slow`` (seconds), ``edit`` (a function over the reply of generate), ``deaf`` (weights are confirmed
    and not loaded), ``end`` (a function over the confirmation), ``fail`` (path that gives 500), ``info`` (a dict over the truth).
    """

    def __init__(self, model, port=0):
        self.model = copy.deepcopy(model)
        self.engine = NativeEngine(self.model, pad_token_id=0)
        self.lies, self.version, self.valid, self.lease, self.paused = {}, 0, True, None, None
        self.calls, self.seen, self.cache, self.lock = [], set(), {}, ONE_AT_A_TIME
        self.updating = None
        self.started = time.time()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def handle_any(self):
                stub.handle(self)

            do_GET = do_POST = do_DELETE = handle_any

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args):
                pass

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self):
        """No word more: listening ends, and every open answer breaks off."""
        self.lies["hang_up"] = 10**6
        self.http.shutdown()
        self.http.server_close()

    close = die

    def handle(self, handler):
        path = handler.path.split("?")[0].strip("/")
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self.calls.append((handler.command, path))
        status, reply = 200, None
        try:
            reply = self.answer(handler, path, body)
        except Refused as refused:
            status, reply = refused.status, {"detail": refused.detail}
        except (BrokenPipeError, ConnectionError):
            raise
        except Exception as error:
            status, reply = 500, {"detail": {"message": f"{type(error).__name__}: {error}"}}
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
        if path != "generate" and name in ("hang_up", "truncate") and self.lies.get(name, 0) < 10**5:
            return False
        left = self.lies.get(name, 0)
        self.lies[name] = max(left - 1, 0)
        return left > 0

    def answer(self, handler, path, body):
        if self.lies.get("fail") == path:
            raise RuntimeError("out of memory")
        binary = handler.headers.get("Content-Type") == "application/x-safetensors"
        asked = {} if binary or not body else json.loads(body)
        if handler.command == "DELETE":
            self.lease = None
            return {}
        if path.endswith("/renew"):
            if self.lease is None or path.split("/")[1] != self.lease[0]:
                raise Refused(404, "no such lease")
            return {}
        held = path in ("begin_update", "update_bucket", "end_update") and self.lease
        if held and handler.headers.get("X-Lease") != self.lease[0]:
            raise Refused(423, f"held by {self.lease[1]}")
        method = getattr(self, f"on_{path}", None)
        if method is None:
            raise Refused(404, "Not Found")
        return method(asked, handler.headers, body if binary else None)

    # Endpoints

    def on_health(self, asked, headers, body):
        if self.lies.get("sick"):
            raise Refused(503, self.lies["sick"])
        return {"status": "ok"}

    def on_info(self, asked, headers, body):
        config = self.model.config
        return {
            "engine": "native",
            "model": "tiny",
            "architectures": [type(self.model).__name__],
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_hidden_layers,
            "num_key_value_heads": config.num_key_value_heads,
            "vocab_size": config.vocab_size,
            "dtype": "float32",
            "max_model_len": config.max_position_embeddings,
            "weight_version": self.version,
            "start_time": self.started,
            "paused": self.paused is not None,
        } | self.lies.get("info", {})

    def on_get_world_size(self, asked, headers, body):
        return {"world_size": 1}

    def on_lease(self, asked, headers, body):
        if self.lease is not None and self.lease[1] != asked["holder"]:
            raise Refused(423, f"held by {self.lease[1]}")
        self.lease = (f"lease{time.monotonic_ns()}", asked["holder"])
        return {"lease_id": self.lease[0]}

    def on_reset_prefix_cache(self, asked, headers, body):
        return {"success": True}

    def on_generate(self, asked, headers, body):
        if self.lies.get("statuses"):
            raise Refused(self.lies["statuses"].pop(0), "not now")
        time.sleep(self.lies.get("slow", 0))
        if not self.valid or self.updating is not None:
            raise Refused(409, "the weights are not whole")
        known = self.cache.get(asked["request_id"])
        if known is None:
            with self.lock:
                known = self.cache[asked["request_id"]] = self.sample(asked)
        reply = copy.deepcopy(known)
        return self.lies["edit"](reply) if self.lies.get("edit") else reply

    def sample(self, asked):
        self.seen.add(asked["request_id"])
        extra = asked["generation_kwargs"]
        seeds = asked.get("seed")
        seeds = seeds if isinstance(seeds, list) else [seeds] * len(asked["prompts"])
        longest = self.model.config.max_position_embeddings
        for i, prompt in enumerate(asked["prompts"]):
            if len(prompt) + asked["max_tokens"] > longest:
                raise Refused(400, f"prompt {i} of {len(prompt)} tokens is too long", index=i)

        def sampling(seed):
            return Sampling(
                asked["max_tokens"],
                temperature=asked["temperature"],
                top_k=asked["top_k"],
                top_p=asked["top_p"],
                min_p=asked["min_p"],
                repetition_penalty=asked["repetition_penalty"],
                stop_token_ids=tuple(extra.get("stop_token_ids", ())),
                top_logps=asked["logprobs"],
                seed=seed,
            )

        requests = [
            Request(p, asked["n"], None if s is None else sampling(s))
            for p, s in zip(asked["prompts"], seeds, strict=True)
        ]
        rollouts = self.engine.generate(requests, sampling(None))
        return {
            "prompt_ids": asked["prompts"],
            "completion_ids": [r.token_ids for r in rollouts],
            "logprobs": [[[x] for x in r.processed_logp or r.logp] for r in rollouts],
            "logprob_token_ids": [[[t] for t in r.token_ids] for r in rollouts],
            "raw_logprobs": [r.logp for r in rollouts],
            "finish_reasons": _grouped([r.finish_reason for r in rollouts], asked["n"]),
            "weight_version": self.version,
        }

    def on_get_sequence_logprobs(self, asked, headers, body):
        rows = [
            Row(ids[:n], [ids[n:]], [[1] * (len(ids) - n)])
            for ids, n in zip(asked["sequences"], asked["prompt_lengths"], strict=True)
        ]
        with self.lock:
            values = sequence_logps(self.model, rows)
        known = [[[float(x)] for x in v] for v in values]
        ids = [[[t] for t in s[n:]] for s, n in zip(asked["sequences"], asked["prompt_lengths"], strict=True)]
        reply = {"logprobs": known, "logprob_token_ids": ids, "actual_logprobs": known, "actual_token_ids": ids}
        return self.lies["scores"](reply) if self.lies.get("scores") else reply

    def on_begin_update(self, asked, headers, body):
        if asked["version"] <= self.version:
            raise Refused(409, f"version {asked['version']} is not above {self.version}", version=self.version)
        known = set(self.model.state_dict())
        if unknown := [n for n in asked.get("names") or [] if n not in known]:
            raise Refused(409, f"unknown names {unknown[:3]}")
        self.updating, self.valid, self.came = asked["version"], False, []
        return {"version": asked["version"], "drained_s": 0.0}

    def on_update_bucket(self, asked, headers, body):
        if self.updating is None:
            raise Refused(409, "no update was begun")
        if body is None:
            with open(asked["path"], "rb") as file:
                data, checksum = file.read(asked["size"]), asked["checksum"]
            tensors = load_safetensors(data)
        else:
            data, checksum, tensors = body, headers["X-Checksum"], load_safetensors(bytes(body))
        if xxhash.xxh3_128(data).hexdigest() != checksum:
            raise Refused(409, "the checksum does not fit")
        if not self.lies.get("deaf"):
            with self.lock, torch.no_grad():
                own = self.model.state_dict()
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)
        self.came += tensors
        return {"loaded": len(tensors), "unexpected": []}

    def on_end_update(self, asked, headers, body):
        tied = set(self.model.all_tied_weights_keys)
        missing = sorted(set(self.model.state_dict()) - set(self.came) - tied) if self.came else []
        if self.lies.get("drop_name"):
            missing.append(self.lies["drop_name"])
        self.version, self.updating, self.valid = asked["version"], None, True
        reply = {"version": self.version, "loaded": len(self.came), "missing": missing, "unexpected": []}
        return self.lies["end"](reply) if self.lies.get("end") else reply

    def on_pause(self, asked, headers, body):
        self.paused = asked["mode"]
        return {"paused": True}

    def on_resume(self, asked, headers, body):
        self.paused = None
        return {"paused": False}

    def on_abort_update(self, asked, headers, body):
        self.updating = None
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

        def answer(handler, path, body):
            if self.armed and path == self.path:
                self.restart()
                raise ConnectionResetError
            return usual(handler, path, body)

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


def _grouped(flat, n):
    return [flat[i : i + n] for i in range(0, len(flat), n)]
