"""`VLLMClient`: one server that speaks vLLM's endpoints; every call with a time-out, retried where that cannot do harm."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import httpx2
import tenacity
from torch import nn

from posttrain.errors import (
    BadRequest,
    ConfigError,
    RolloutServerError,
    ServerBusy,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.extensions.server.replies import (
    API_KEY_VARIABLE,
    GENERATE,
    INCOMPLETE,
    LOOPBACK,
    Scores,
    check_expansion,
    checked_choices,
    completions_reply,
    content_parts,
    generate_body,
    pictures_body,
    ranked,
    reading,
    scores_of,
)
from posttrain.extensions.server.tokens import LocalToken
from posttrain.integrations.network import CONNECTIONS, host_and_port, network_advice
from posttrain.types import Request

if TYPE_CHECKING:
    import torch

    from posttrain.pictures.processors import PictureProcessor

logger = logging.getLogger(__name__)

# Seconds to connect, and to be answered where nothing is to be computed: health, versions.
QUICK_SECONDS = 5.0
GENERATE_TIMEOUT, PAUSE_TIMEOUT, UPDATE_TIMEOUT = 600.0, 300.0, 720.0
# Of a request's time-out, beyond 30 s.
SECONDS_PER_TOKEN = 0.02
# Requests of one call that are on their way at once; servers batch them by themselves.
AT_ONCE = 256
# Seconds before the second try, doubled at each further one up to the longest.
BACK_OFF, LONGEST_WAIT = 0.5, 8.0
# Statuses after which the same request is sent again.
UNMADE = (429, 502, 503, 504)
# Phase of `WeightSyncError` by path.
PHASES = {
    "/init_weight_transfer_engine": "init",
    "/start_weight_update": "begin",
    "/update_weights": "bucket",
    "/finish_weight_update": "end",
    "/v1/load_lora_adapter": "adapter",
}
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ROLES = {"rollout": "vllm_server_base_url", "teacher": "teacher_model_server_url"}
# Sampling that changes nothing; all of it is sent, so that defaults of the model's folder do not count.
NEUTRAL = {"temperature": 1.0, "max_tokens": 16, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Further fields of a request.
FURTHER = {"ignore_eos", "stop_token_ids", "min_tokens", "stop", "logit_bias", "structured_outputs", "seed"}
FURTHER |= {"frequency_penalty", "presence_penalty"}


class VLLMClient:
    """Talks to one rollout server: vLLM's own (`posttrain vllm-serve`, ``vllm serve``) or `posttrain serve`.

    Args:
        base_url: ``http://host:port``; None builds it from ``host`` and ``server_port``.
        host: Where the server listens; ``0.0.0.0`` is this machine.
        server_port: Its port.
        group_port: Port of the weight-update group on GPUs; 0 takes a free one.
        connection_timeout: Seconds to wait for the server to be healthy; 0 asks once.
        request_timeout: Seconds a generation may take; None: 600, or 30 and 20 ms a requested token where that is more.
        sync_timeout: Seconds one call of a weight update may take.
        api_key: Sent as bearer token. ``None`` (default): that of ``$POSTTRAIN_API_KEY``; without one, the token that a server of
            this user and machine wrote to its file.
        reader: Of pictures in prompts, as the trainer reads them; None: prompts are text.
        role: ``rollout`` or ``teacher``: what errors call the server, and which option of a config has its address.

    Raises:
        ServerUnreachable: No healthy answer within ``connection_timeout``.

    >>> client = VLLMClient("http://127.0.0.1:8000", connection_timeout=60)  # doctest: +SKIP
    >>> client.generate([[1, 2, 3]], n=4, max_tokens=16)["completion_ids"]  # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str | None = None,
        host: str = "0.0.0.0",
        server_port: int = 8000,
        group_port: int = 51216,
        connection_timeout: float = 0.0,
        *,
        request_timeout: float | None = None,
        sync_timeout: float = UPDATE_TIMEOUT,
        api_key: str | None = None,
        reader: PictureProcessor | None = None,
        role: str = "rollout",
    ) -> None:
        self.reader, self.role = reader, role
        self.base_url = (base_url or f"http://{host_and_port(host, server_port)}").rstrip("/")
        try:
            parts = urlsplit(self.base_url)
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # A port that is no number, a bracket that is not closed.
            valid = False
        if not valid:
            raise ConfigError(f"base_url={base_url!r} is no address of a server. It looks like 'http://10.0.0.5:8000'.")
        # 0.0.0.0 is an address to listen on, not one to connect to.
        self.base_url = self.base_url.replace("//0.0.0.0", "//127.0.0.1", 1).replace("//[::]", "//[::1]", 1)
        self.host = str(urlsplit(self.base_url).hostname)
        # Errors and logs show the address without user and password.
        user, _, password = urlsplit(self.base_url).netloc.rpartition("@")[0].partition(":")
        self.base_url = re.sub(r"(?<=://)[^/]*@", "", self.base_url)
        self.group_port, self.request_timeout, self.sync_timeout = group_port, request_timeout, sync_timeout
        self.communicator: Any = None  # `posttrain.extensions.server.weight_sync.NcclSender`
        self.facts: dict[str, Any] = {}
        self.adapter = ""  # Of a vLLM: the LoRA adapter that is asked, by the version it is named after.
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        self.session = httpx2.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            auth=self._auth(unquote(user), unquote(password), api_key),
            limits=CONNECTIONS,
            trust_env=not self.is_local,  # A proxy of the environment knows no way back to this machine.
        )
        self.check_server(connection_timeout)
        self.info()

    def _auth(self, user: str, password: str, api_key: str | None) -> httpx2.Auth | None:
        """Return credentials: user and password of the address, or the token of a server of this machine's user."""
        if user:
            return httpx2.BasicAuth(user, password)
        return LocalToken(urlsplit(self.base_url).port or 80) if self.is_local and not api_key else None

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, so that memory can be shared with it."""
        return self.host in LOOPBACK

    # HTTP

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float = PAUSE_TIMEOUT,
        retries: int = 0,
    ) -> dict[str, Any]:
        """One request and its answer, sent again up to ``retries`` times where nothing came, or a 502, 503, 504 or 429.

        Args:
            method: ``GET`` or ``POST``.
            path: Below the server's address.
            body: Sent as JSON; a ``POST`` without one sends an empty object.
            timeout: Seconds to be answered.
            retries: Further tries.

        Raises:
            ServerUnreachable: No connection, no answer in time, or one that breaks off.
            BadRequest: 400, 413 or 422.
            ServerBusy: 429, 502, 503 or 504 with no try left.
            WeightSyncError: 409, or any failure of an update.
        """
        again = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(retries + 1),
            wait=tenacity.wait_random_exponential(BACK_OFF, LONGEST_WAIT),
            retry=tenacity.retry_if_exception(_may_pass),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        return again(self._once, method, path, body, timeout)

    def _once(self, method: str, path: str, body: Any, timeout: float) -> dict[str, Any]:
        url, limit = self.base_url + path, httpx2.Timeout(timeout, connect=QUICK_SECONDS)
        # After an error vLLM closes the connection: the next request of an update, which is sent once, takes a new one.
        headers = {"Connection": "close"} if path in PHASES else None
        body = {} if body is None and method == "POST" else body
        try:
            response = self.session.request(method, url, timeout=limit, headers=headers, json=body)
            # Health and others answer nothing but 200, or null; adapters a sentence.
            said = response.status_code == 200 and response.content and path not in ADAPTER_PATHS
            answer = (response.json() if said else None) or {}
        except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            text = f"{url} gave no answer within {timeout:g} s. {network_advice(error, url)}"
            raise ServerUnreachable(text, timed_out=True, url=self.base_url) from error
        except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
            # A ValueError: what came is half of a JSON text. A RuntimeError: the server was taken off the list meanwhile, and
            # its connections were closed.
            raise ServerUnreachable(
                f"{url} could not be reached, or its answer broke off: {error}. {network_advice(error, url)}",
                url=self.base_url,
            ) from error
        if response.status_code != 200:
            raise self._failure(path, response)
        if not isinstance(answer, dict):
            raise RolloutServerError(f"{url} answered {answer!r:.200}, which is no JSON object.", url=self.base_url)
        return answer

    def _failure(self, path: str, response: httpx2.Response) -> RolloutServerError:
        """The typed error of a status other than 200."""
        status, url, reason = response.status_code, self.base_url, response.text[:500]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            reason = response.json()["error"]["message"]
        text = f"{url}{path} answered {status}: {reason}"
        if path in PHASES or status == 409 or (status == 404 and self.adapter and self.adapter in reason):
            return WeightSyncError(text, phase=PHASES.get(path, "generate"), url=url)
        kinds = {400: BadRequest, 413: BadRequest, 422: BadRequest} | dict.fromkeys(UNMADE, ServerBusy)
        return kinds.get(status, RolloutServerError)(text, url=url)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server says that it is healthy; any other answer counts as none.

        Raises:
            ServerUnreachable: Not within ``total_timeout`` seconds; holds the last answer.
        """
        waiting = tenacity.Retrying(
            stop=tenacity.stop_before_delay(total_timeout),
            wait=tenacity.wait_fixed(min(retry_interval, max(total_timeout, 0.01))),
            retry=tenacity.retry_if_exception_type(RolloutServerError),
            reraise=True,
        )
        try:
            waiting(self.health)
        except RolloutServerError as last:
            raise ServerUnreachable(
                f"no healthy {self.role} server at {self.base_url} within {total_timeout:g} s. The last answer: {last} Fix: "
                f"start one with 'posttrain serve --model MODEL' (vLLM: 'posttrain vllm-serve'), or correct {ROLES[self.role]}.",
                url=self.base_url,
            ) from last

    def health(self) -> None:
        """Raise where the server is not healthy."""
        # Once more: after an error a server closes the connection that would be used again.
        self.call("GET", "/health", timeout=QUICK_SECONDS, retries=1)

    # What the server is

    def info(self) -> dict[str, Any]:
        """Model, limits and ``weight_version``, as far as the server says; ``takes_no_weights`` says what it lacks."""
        if not self.facts:
            reply = self.call("GET", "/v1/models", timeout=QUICK_SECONDS, retries=2)
            with reading(reply, self.base_url):
                cards = reply.get("data") or [{}]
                card = next((card for card in cards if card.get("parent") is None), cards[0])
                known = {"model": card.get("root") or card.get("id"), "max_model_len": card.get("max_model_len")}
            self.facts = known | {"served": card.get("id")} | self._facts()
            if self.reader is not None and self.facts["engine"] == "vllm" and self._generates_from_pictures():
                self.facts["placeholder"] = self.reader.token_id
        known = self.facts | {"weight_version": self.weight_version()}
        if not known["weight_version"]:
            known.setdefault("takes_no_weights", "it does not tell the version of its weights, as vLLM does from 0.27")
        return known

    def _facts(self) -> dict[str, Any]:
        """By the worker extension; without it, by the server's own config, which developer mode shows."""
        try:
            body = {"method": "posttrain_facts", "kwargs": {}}
            reply = self.call("POST", "/collective_rpc", body, timeout=QUICK_SECONDS, retries=2)
            with reading(reply, self.base_url):
                return dict(reply["results"][0])
        except ServerUnreachable:
            raise
        except RolloutServerError:
            pass
        try:
            config = self.call("GET", "/server_info?config_format=json", timeout=30.0, retries=2)["vllm_config"]
        except RolloutServerError:
            return {"engine": "vllm", "takes_no_weights": "it runs without VLLM_SERVER_DEV_MODE=1"}
        model, backend = config.get("model_config") or {}, (config.get("weight_transfer_config") or {}).get("backend")
        known = {"engine": "vllm", "transfer": backend, "checkpoint_names": True}
        known |= {name: model.get(name) for name in ("dtype", "revision", "quantization")}
        if backend != "nccl":
            known["takes_no_weights"] = f"it runs without our worker extension, and its weight transfer is {backend}"
        return known

    def _generates_from_pictures(self) -> bool:
        """Whether a vLLM has `GENERATE` (0.32: with ``--enable-scale-out``)."""
        try:
            self.call("POST", GENERATE, {}, timeout=QUICK_SECONDS)
        except BadRequest:
            return True  # It misses the token ids.
        except ServerUnreachable:
            raise
        except RolloutServerError:
            pass
        return False

    def pictures_fields(self, request: Request) -> dict[str, Any]:
        """A request's pictures as fields that this server takes, for ``own`` of `complete`."""
        if self.reader is not None and self.facts["engine"] == "vllm":
            return content_parts(request, self.reader)
        return pictures_body(request)

    def weight_version(self) -> str:
        """What the server calls its weights: the name that was pushed last; empty where it does not say."""
        if self.adapter:
            cards = self.call("GET", "/v1/models", timeout=QUICK_SECONDS, retries=2).get("data") or []
            # Where it was restarted it has lost it, and says what its base model is.
            self.adapter = self.adapter if self.adapter in [card.get("id") for card in cards] else ""
        return self.adapter or self._weight_info()[0]

    def base_version(self) -> str:
        """What the server calls its own weights, below an adapter; empty where it does not say."""
        return self._weight_info()[1]

    def _weight_info(self) -> tuple[str, str]:
        try:
            reply = self.call("GET", "/weight_info", timeout=QUICK_SECONDS, retries=2)
            version = str(reply.get("weight_version"))
            return version, str(reply.get("base_version", version))
        except ServerUnreachable:
            raise
        except RolloutServerError:
            return "", ""

    # Generation

    def complete(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        n: int = 1,
        seeds: Sequence[int | None] | None = None,
        retries: int = 3,
        own: Sequence[dict[str, Any]] | None = None,
        **body: Any,
    ) -> list[dict[str, Any]]:
        """Completions by ``/v1/completions``: ``n`` choices of each prompt, in order; each prompt is a request of its own.

        A request that is sent again is computed again: with a seed it says the same, and nothing else depends on it.

        Args:
            prompts: Token ids of each, or texts (which `posttrain serve` does not take).
            n: Completions a prompt.
            seeds: One a prompt; None: the server draws them.
            retries: Further tries where nothing came, or a 502, 503 or 504.
            own: Further fields of each prompt.
            body: Further fields.

        Returns:
            Choices as the server words them; each names by ``weight_version`` the weights that wrote it.

        Raises:
            WeightSyncError: The weights are not whole, or changed while a server sampled that does not say which wrote what.
        """
        # vLLM refuses several of what can only be one.
        drawn = 1 if body.get("temperature") == 0 else n
        adapter = self.adapter
        body = {"model": adapter or self.facts.get("served"), "n": drawn, "logprobs": 0, "max_tokens": 16} | body
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        tells, vocabulary = self.facts.get("tells_versions", False), self.facts.get("vocab_size")
        before = "" if tells or adapter else self._whole_version()
        timeout = self.time_for(len(prompts) * n * body["max_tokens"])

        def ask(prompt: Any, seed: int | None, fields: dict[str, Any]) -> list[dict[str, Any]]:
            sent, path = body | fields | ({} if seed is None else {"seed": seed}), "/v1/completions"
            pictured = "content_parts" in fields
            sent, path = (generate_body(sent), GENERATE) if pictured else (sent | {"prompt": prompt}, path)
            reply = self.call("POST", path, sent, timeout=timeout, retries=retries)
            if pictured:
                with reading(reply, self.base_url):
                    reply = completions_reply(reply)
                check_expansion(reply["choices"], prompt, self.base_url)
            with reading(reply, self.base_url):
                choices_of_reply = checked_choices(reply, prompt, drawn, body["max_tokens"], vocabulary, self.base_url)
                if tells:
                    _ = [choice["weight_version"] for choice in choices_of_reply]
            return choices_of_reply * (n // drawn)

        with ThreadPoolExecutor(max_workers=max(min(len(prompts), AT_ONCE), 1)) as pool:
            answers = pool.map(ask, prompts, seeds or [None] * len(prompts), own or [{}] * len(prompts))
            choices = [choice for choices_of_reply in answers for choice in choices_of_reply]
        if tells:
            return choices
        if adapter:  # It answers by this name alone, and its base is held by nobody who would change it.
            return [choice | {"weight_version": adapter} for choice in choices]
        after = self._whole_version()
        if after != before:
            raise WeightSyncError(
                f"the weights of {self.base_url} changed from version {before} to {after} while it sampled.",
                phase="reply",
                url=self.base_url,
            )
        return [choice | {"weight_version": after} for choice in choices]

    def _whole_version(self) -> str:
        version = self.weight_version()
        if version == INCOMPLETE:
            raise WeightSyncError(
                f"the weights of {self.base_url} are not whole: a push failed midway. Push all of them again.",
                phase="generate",
                url=self.base_url,
            )
        return version

    def time_for(self, tokens: int) -> float:
        """Seconds a generation of this many tokens may take."""
        return self.request_timeout or max(GENERATE_TIMEOUT, 30 + SECONDS_PER_TOKEN * tokens)

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        n: int = 1,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """Sample ``n`` completions a prompt; arguments and reply are those of TRL's client.

        Args:
            prompts: Texts or token ids.
            n: Completions a prompt.
            logprobs: 0: of the sampled token; k: of the k most likely too; None: none in the reply.
            structured_outputs_regex: Pattern that completions match.
            generation_kwargs: Further fields of a request: ``seed``, ``stop``, ``min_tokens``, and so on.
            sampling: ``temperature``, ``max_tokens``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``; what is left out
                is at its neutral value, and ``max_tokens`` at 16.

        Returns:
            ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``logprob_token_ids`` by rank, ``finish_reasons``,
            ``weight_versions``.

        Raises:
            BadRequest: Fields that servers do not know.
        """
        body = NEUTRAL | sampling | dict(generation_kwargs or {})
        # vLLM would leave them out in silence.
        if unknown := sorted(body.keys() - NEUTRAL.keys() - FURTHER):
            raise BadRequest(f"{', '.join(unknown)}: servers have no such field.", url=self.base_url)
        if structured_outputs_regex is not None:
            body["structured_outputs"] = {"regex": structured_outputs_regex}
        choices = self.complete(prompts, n=n, logprobs=logprobs or 0, **body)
        with reading(choices, self.base_url):
            lines = [ranked(choice) for choice in choices]
        values = [[[None if math.isnan(v) else v for _, v in at] for at in line] for line in lines]
        return {
            "prompt_ids": [choice["prompt_token_ids"] for choice in choices[::n]],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": None if logprobs is None else values,
            "logprob_token_ids": None if logprobs is None else [[[i for i, _ in at] for at in line] for line in lines],
            "finish_reasons": [choice.get("finish_reason") for choice in choices],
            "weight_versions": [choice["weight_version"] for choice in choices],
        }

    def score(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], *, top: int = 0) -> list[Scores]:
        """Log-probs of given sequences under the served weights, at temperature 1: for teachers, and for comparisons.

        Sequences are sent as requests of their own, 16 at once; the server batches them.

        Args:
            sequences: Token ids, prompts included.
            prompt_lengths: First tokens of each that are not scored.
            top: k most likely tokens returned at every position, with their log-probs; 0: the given token's alone.

        Returns:
            One `Scores` a sequence, of ``len(sequence) - prompt_length`` positions.

        Raises:
            ConfigError: Lists of unequal length.

        >>> scores = client.score([[1, 2, 3, 4]], [2], top=20)[0]  # doctest: +SKIP
        >>> scores.logps, scores.top_ids, scores.top_logps  # (2,), (2, 20), (2, 20)  # doctest: +SKIP
        """
        if len(sequences) != len(prompt_lengths):
            raise ConfigError(f"{len(sequences)} sequences and {len(prompt_lengths)} prompt_lengths: give one of each.")
        most = int(self.facts.get("max_model_len") or 10**9) - 1  # vLLM generates one token too, which must fit.

        def ask(ids: Sequence[int], begin: int) -> Scores:
            body = {
                "model": self.adapter or self.facts.get("served"),
                "prompt": list(ids)[:most],
                "max_tokens": 1,
                "prompt_logprobs": top,
            }
            reply = self.call("POST", "/v1/completions", body, timeout=self.time_for(len(ids)), retries=3)
            with reading(reply, self.base_url):
                return scores_of(ids, begin, reply["choices"][0]["prompt_logprobs"], top)

        with ThreadPoolExecutor(max_workers=16) as pool:
            return list(pool.map(ask, sequences, prompt_lengths))

    # State

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier requests.

        Raises:
            WeightSyncError: The server did not.
        """
        if self.call("POST", "/reset_prefix_cache").get("success") is False:
            raise WeightSyncError(f"{self.base_url} refused to forget keys and values.", phase="end", url=self.base_url)

    def pause(self) -> None:
        """Hold generation once what runs has ended; requests that come meanwhile wait."""
        self.call("POST", "/pause?mode=wait", timeout=self.sync_timeout, retries=3)

    def resume(self) -> None:
        """Go on after `pause`; fine without one."""
        self.call("POST", "/resume", retries=3)

    # Weights

    def begin_update(self) -> None:
        """Hold generation and begin an update; until `end_update` the weights are called incomplete.

        Raises:
            WeightSyncError: The server takes no weights.
        """
        why = self.facts.get("takes_no_weights")
        if self.facts.get("transfer") == "shared memory" and not self.is_local:
            why = "it takes them through shared memory, and runs on another machine"
        if why:
            raise WeightSyncError(
                f"{self.base_url} takes no weights from here: {why}. Fix: 'posttrain vllm-serve --model "
                f"{self.facts.get('model')}' on this machine; from another one with --weight-transfer-config "
                '\'{"backend": "nccl"}\'.',
                phase="begin",
                url=self.base_url,
            )
        # A server that hangs is noticed now, not at the end of a longer call.
        self.health()
        self.adapter = ""  # What is pushed now is whole, or below the next one.
        if self.facts.get("transfer") == "nccl" and self.communicator is None:
            self.init_communicator()
        self.pause()
        self.call("POST", "/update_weight_version", {"new_version": INCOMPLETE}, timeout=QUICK_SECONDS)
        start = functools.partial(self.call, "POST", "/start_weight_update", {}, timeout=self.sync_timeout)
        try:
            start()
        except WeightSyncError as error:
            if "already active" not in str(error):
                raise
            # The trainer that began it died.
            self.call("POST", "/finish_weight_update", {}, timeout=self.sync_timeout)
            start()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter from a folder of this machine, beside those it has, and ask it from now on.

        Raises:
            WeightSyncError: The server does not take it: its rank, its names, or it takes no adapters.
        """
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            self.call("POST", "/v1/load_lora_adapter", body, timeout=self.sync_timeout)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"{error} Fix: serve the base model that is trained, with --enable-lora and --max-lora-rank (posttrain "
                "vllm-serve), or set adapter_sync='merged'.",
                phase="adapter",
                url=self.base_url,
            ) from error
        self.adapter = "" if self.facts.get("tells_versions") else name

    def unload_adapter(self, name: str) -> None:
        """Let an adapter go that nothing asks any more; requests under way with it end as they began."""
        with contextlib.suppress(RolloutServerError):
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=QUICK_SECONDS)

    def send_part(self, **update_info: Any) -> None:
        """One ``/update_weights``: a bucket in shared memory, what is broadcast next, or that all buckets came.

        It is never sent twice: a server that had taken the first would take another.
        """
        self.call("POST", "/update_weights", {"update_info": update_info}, timeout=self.sync_timeout)

    def end_update(self, version: str) -> None:
        """All buckets came: the server checks that nothing is missing, forgets old keys and values, and goes on.

        Args:
            version: Name of the weights from now on.

        Raises:
            WeightSyncError: Weights are missing or unknown, or the server confirms another version.
        """
        try:
            if self.communicator is None:
                self.send_part(complete=True)
            self.call("POST", "/finish_weight_update", {"weight_version": version}, timeout=self.sync_timeout)
            self.reset_prefix_cache()
            if (
                "placeholder" in self.facts and self.facts["engine"] == "vllm"
            ):  # Features of pictures by the weights before.
                self.call("POST", "/reset_encoder_cache")
        except WeightSyncError as error:
            error.phase = "end"
            raise
        confirmed = self.weight_version()
        if confirmed != version:
            raise WeightSyncError(
                f"{self.base_url} confirmed version {confirmed} after version {version} was sent.",
                phase="end",
                url=self.base_url,
            )
        self.resume()

    def abort_update(self) -> None:
        """Give an update up: its weights stay incomplete, and are sampled from only after a whole update."""
        for path, body in (
            ("/update_weight_version", {"new_version": INCOMPLETE}),
            ("/finish_weight_update", {}),
            ("/resume", {}),
        ):
            try:
                self.call("POST", path, body, timeout=QUICK_SECONDS)
            except RolloutServerError as error:
                logger.info("%s did not take the end of a failed update: %s", self.base_url, error)

    def init_communicator(self, device: torch.device | str = 0) -> None:
        """Join the server's weight-update group over NCCL, as TRL's client does; needs vLLM and a GPU of one's own."""
        from posttrain.extensions.server.weight_sync import NcclSender

        self.communicator = NcclSender(self, device)

    def update_model_params(self, model: nn.Module, version: str | None = None) -> None:
        """Replace all weights by those of a model; ``version`` names them, and every later reply says so."""
        from posttrain.extensions.server.weight_sync import Pusher
        from posttrain.rollouts.shared_weights import Weights

        pusher = Pusher()
        try:
            weights = Weights(model, checkpoint_names=bool(self.facts.get("checkpoint_names")))
            result = pusher.push(weights, [self], version or f"{secrets.token_hex(4)}-1")[self]
        finally:
            pusher.close()
        if result is not None:
            raise result

    def close_communicator(self) -> None:
        """Leave the weight-update group; calling it twice does nothing."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    def close(self) -> None:
        """Leave the group, and close the connections."""
        self.close_communicator()
        self.session.close()


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may be answered a little later; one that timed out would take as long again."""
    return isinstance(error, ServerUnreachable | ServerBusy) and not error.timed_out
