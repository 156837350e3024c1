"""`VLLMClient`: client of one server with vLLM's endpoints. Every call has a timeout. Calls without side effects are
retried.
"""

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

    from posttrain.extensions.images.processors import PictureProcessor

logger = logging.getLogger(__name__)

# Timeout in seconds for connecting, and for requests that need no computation on the server, such as health and versions.
QUICK_SECONDS = 5.0
GENERATE_TIMEOUT, PAUSE_TIMEOUT, UPDATE_TIMEOUT = 600.0, 300.0, 720.0
# The timeout of a generation request is 30 s plus this number of seconds per requested token.
SECONDS_PER_TOKEN = 0.02
# Maximum number of requests that one call sends concurrently. Servers batch concurrent requests.
AT_ONCE = 256
# Wait in seconds before a retry: BACK_OFF before the first retry, twice as long for each further retry, up to LONGEST_WAIT.
BACK_OFF, LONGEST_WAIT = 0.5, 8.0
# HTTP status codes after which a request is retried.
UNMADE = (429, 502, 503, 504)
# Maps each path of a weight update to the phase that `WeightSyncError` reports.
PHASES = {
    "/init_weight_transfer_engine": "init",
    "/start_weight_update": "begin",
    "/update_weights": "bucket",
    "/finish_weight_update": "end",
    "/v1/load_lora_adapter": "adapter",
}
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ROLES = {"rollout": "vllm_server_base_url", "teacher": "teacher_model_server_url"}
# Values of sampling settings that do not change the distribution. Every request contains all settings, so that the defaults in
# the model's generation config are never used.
NEUTRAL = {"temperature": 1.0, "max_tokens": 16, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# Names of request fields without a neutral value.
FURTHER = {"ignore_eos", "stop_token_ids", "min_tokens", "stop", "logit_bias", "structured_outputs", "seed"}
FURTHER |= {"frequency_penalty", "presence_penalty"}


class VLLMClient:
    """Client of one rollout server: vLLM (`posttrain vllm-serve`, ``vllm serve``) or `posttrain serve`.

    Args:
        base_url: ``http://host:port``. None: the address is built from ``host`` and ``server_port``.
        host: Host of the server. ``0.0.0.0`` means this machine.
        server_port: Port of the server.
        group_port: Port of the weight-update group on GPUs. 0 selects a free port.
        connection_timeout: Maximum number of seconds to wait until the server is healthy. 0: try only once.
        request_timeout: Timeout of a generation request in seconds. None: 30 plus 0.02 per requested token, but at least 600.
        sync_timeout: Timeout of each HTTP call of a weight update, in seconds.
        api_key: Bearer token. None (default) uses ``$POSTTRAIN_API_KEY``, or the token that a server of the same user on
            this machine has written to a file.
        reader: The trainer's image processor for prompts. None: prompts contain only text.
        role: ``rollout`` or ``teacher``. Error messages contain the role and the config option of its address.

    Raises:
        ServerUnreachable: The server is not healthy within ``connection_timeout``.

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
        except ValueError:  # Parsing fails with this error if the port is not a number, or if a bracket is not closed.
            valid = False
        if not valid:
            raise ConfigError(
                f"base_url={base_url!r} is not a server address. Use an address like 'http://10.0.0.5:8000'."
            )
        # Replace 0.0.0.0 and [::]. A server can listen on these addresses, but a client cannot connect to them.
        self.base_url = self.base_url.replace("//0.0.0.0", "//127.0.0.1", 1).replace("//[::]", "//[::1]", 1)
        self.host = str(urlsplit(self.base_url).hostname)
        # Remove user name and password from the address, so that errors and logs do not contain them.
        user, _, password = urlsplit(self.base_url).netloc.rpartition("@")[0].partition(":")
        self.base_url = re.sub(r"(?<=://)[^/]*@", "", self.base_url)
        self.group_port, self.request_timeout, self.sync_timeout = group_port, request_timeout, sync_timeout
        # The `NcclSender` for weight updates between GPUs. None until it is created.
        self.communicator: Any = None
        self.facts: dict[str, Any] = {}
        # Name of the LoRA adapter to sample from, on vLLM. The name contains the weight version. Empty: no adapter.
        self.adapter = ""
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        self.session = httpx2.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            auth=self._auth(unquote(user), unquote(password), api_key),
            limits=CONNECTIONS,
            # Ignore proxies from the environment for a server on this machine, because a proxy could not reach it.
            trust_env=not self.is_local,
        )
        self.check_server(connection_timeout)
        self.info()

    def _auth(self, user: str, password: str, api_key: str | None) -> httpx2.Auth | None:
        """Return the credentials for requests: user and password from the address, or else the token from the file of a
        server on this machine. Return None if neither applies, or if ``api_key`` is set.
        """
        if user:
            return httpx2.BasicAuth(user, password)
        return LocalToken(urlsplit(self.base_url).port or 80) if self.is_local and not api_key else None

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine. Weights can then be sent through shared memory."""
        return self.host in LOOPBACK

    # HTTP requests.

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float = PAUSE_TIMEOUT,
        retries: int = 0,
    ) -> dict[str, Any]:
        """Send a request and return the response. Retry if there is no response, or after status 429, 502, 503 or 504.

        Args:
            method: ``GET`` or ``POST``.
            path: Path of the endpoint.
            body: JSON body. For a ``POST`` request, None sends an empty object.
            timeout: Maximum number of seconds until the response arrives.
            retries: Maximum number of further attempts after the first attempt.

        Raises:
            ServerUnreachable: There is no connection, no response in time, or an incomplete response.
            BadRequest: The status is 400, 413 or 422.
            ServerBusy: The status is still 429, 502, 503 or 504 after all retries.
            WeightSyncError: The status is 409, or a weight update failed.
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
        # Use a new connection for each request of a weight update. These requests are not retried, and vLLM closes
        # connections after an error.
        headers = {"Connection": "close"} if path in PHASES else None
        body = {} if body is None and method == "POST" else body
        try:
            response = self.session.request(method, url, timeout=limit, headers=headers, json=body)
            # Parse only responses with content. Some endpoints return an empty body or null, and adapter endpoints
            # return text.
            has_body = response.status_code == 200 and response.content and path not in ADAPTER_PATHS
            answer = (response.json() if has_body else None) or {}
        except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            text = f"{url} did not respond within {timeout:g} s. {network_advice(error, url)}"
            raise ServerUnreachable(text, timed_out=True, url=self.base_url) from error
        except (httpx2.HTTPError, OSError, ValueError, RuntimeError) as error:
            # A ValueError means that the JSON is incomplete. A RuntimeError means that this process closed the connections,
            # because the server was removed from the list of servers.
            raise ServerUnreachable(
                f"{url} could not be reached, or its response was incomplete: {error}. {network_advice(error, url)}",
                url=self.base_url,
            ) from error
        if response.status_code != 200:
            raise self._failure(path, response)
        if not isinstance(answer, dict):
            raise RolloutServerError(f"{url} returned {answer!r:.200}, which is not a JSON object.", url=self.base_url)
        return answer

    def _failure(self, path: str, response: httpx2.Response) -> RolloutServerError:
        """Convert a response with a status other than 200 to an exception."""
        status, url, reason = response.status_code, self.base_url, response.text[:500]
        with contextlib.suppress(ValueError, KeyError, TypeError):
            reason = response.json()["error"]["message"]
        text = f"{url}{path} returned {status}: {reason}"
        if path in PHASES or status == 409 or (status == 404 and self.adapter and self.adapter in reason):
            return WeightSyncError(text, phase=PHASES.get(path, "generate"), url=url)
        kinds = {400: BadRequest, 413: BadRequest, 422: BadRequest} | dict.fromkeys(UNMADE, ServerBusy)
        return kinds.get(status, RolloutServerError)(text, url=url)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is healthy.

        Raises:
            ServerUnreachable: The server is not healthy within ``total_timeout`` seconds. The message contains the last
                response.
        """
        waiting = tenacity.Retrying(
            stop=tenacity.stop_before_delay(total_timeout),
            wait=tenacity.wait_fixed(min(retry_interval, max(total_timeout, 0.01))),
            retry=tenacity.retry_if_exception_type(RolloutServerError),
            before_sleep=self._log_wait,
            reraise=True,
        )
        try:
            waiting(self.health, retries=0)
        except RolloutServerError as last:
            raise ServerUnreachable(
                f"no healthy {self.role} server at {self.base_url} within {total_timeout:g} s. Last response: {last} "
                "Fix: start one with 'posttrain serve --model MODEL' (vLLM: 'posttrain vllm-serve'), or correct "
                f"{ROLES[self.role]}.",
                url=self.base_url,
            ) from last

    def _log_wait(self, state: tenacity.RetryCallState) -> None:
        """Log the first failed attempt to reach the server, and every 15th attempt after it."""
        if state.attempt_number % 15 == 1 and state.outcome is not None:
            logger.warning("Waiting for the server at %s: %s", self.base_url, state.outcome.exception())

    def health(self, retries: int = 1) -> None:
        """Raise an error if the server is not healthy. By default, retry once, because vLLM closes a connection after an
        error.
        """
        self.call("GET", "/health", timeout=QUICK_SECONDS, retries=retries)

    # Properties of the server.

    def info(self) -> dict[str, Any]:
        """Return the server's model, limits and ``weight_version``. If the server does not support weight updates,
        ``takes_no_weights`` contains the reason.
        """
        if not self.facts:
            reply = self.call("GET", "/v1/models", timeout=QUICK_SECONDS, retries=2)
            with reading(reply, self.base_url):
                cards = reply.get("data") or [{}]
                card = next((card for card in cards if card.get("parent") is None), cards[0])
                info = {"model": card.get("root") or card.get("id"), "max_model_len": card.get("max_model_len")}
            self.facts = info | {"served": card.get("id")} | self._facts()
            if self.reader is not None and self.facts["engine"] == "vllm" and self._generates_from_pictures():
                self.facts["placeholder"] = self.reader.token_id
        info = self.facts | {"weight_version": self.weight_version()}
        if not info["weight_version"]:
            info.setdefault(
                "takes_no_weights", "it does not report the version of its weights, which vLLM does since 0.27"
            )
        return info

    def _facts(self) -> dict[str, Any]:
        """Return the server's properties. posttrain's worker extension reports all properties. Without this extension,
        return the properties that vLLM reports in developer mode.
        """
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
        facts = {"engine": "vllm", "transfer": backend, "checkpoint_names": True}
        facts |= {name: model.get(name) for name in ("dtype", "revision", "quantization")}
        if backend != "nccl":
            facts["takes_no_weights"] = (
                f"it runs without posttrain's worker extension, and its weight transfer is {backend}"
            )
        return facts

    def _generates_from_pictures(self) -> bool:
        """Return whether a vLLM server has the endpoint `GENERATE`, which accepts images. vLLM 0.32 has it only with the
        option ``--enable-scale-out``.
        """
        try:
            self.call("POST", GENERATE, {}, timeout=QUICK_SECONDS)
        except BadRequest:
            return True  # The endpoint exists, because the server rejected only the missing token ids.
        except ServerUnreachable:
            raise
        except RolloutServerError:
            pass
        return False

    def pictures_fields(self, request: Request) -> dict[str, Any]:
        """Return the request fields that contain a prompt's images. Pass them to `complete` as ``own``."""
        if self.reader is not None and self.facts["engine"] == "vllm":
            return content_parts(request, self.reader)
        return pictures_body(request)

    def weight_version(self) -> str:
        """Return the name of the server's weight version. The last push has set this name. Return "" if the
        server does not report it.
        """
        if self.adapter:
            cards = self.call("GET", "/v1/models", timeout=QUICK_SECONDS, retries=2).get("data") or []
            # Clear the adapter's name if the server no longer has the adapter. After a restart, the server samples from the
            # base model.
            self.adapter = self.adapter if self.adapter in [card.get("id") for card in cards] else ""
        return self.adapter or self._weight_info()[0]

    def base_version(self) -> str:
        """Return the version name of the server's base weights, without an adapter. Return "" if the server does not
        report it.
        """
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

    # Methods that request completions and scores.

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
        """Request ``n`` completions of each prompt from ``/v1/completions``. Return them in the order of the prompts.

        Each prompt is a separate request. If a request is retried, its completions are sampled again. With a seed, the
        result of a retry is the same.

        Args:
            prompts: Token ids or texts. `posttrain serve` supports only token ids.
            n: Number of completions per prompt.
            seeds: One seed per prompt. If None, the server selects the seeds.
            retries: Maximum number of retries of a request. See `call`.
            own: Additional request fields of each prompt.
            body: Additional request fields of all prompts.

        Returns:
            Choices of the responses. Each choice has the additional key ``weight_version``.

        Raises:
            WeightSyncError: The server's weights are incomplete. The error is also raised if the weights changed during
                sampling and the server does not report the version of each choice.
        """
        # vLLM does not allow n > 1 with greedy decoding, so sample one completion and repeat it.
        drawn = 1 if body.get("temperature") == 0 else n
        adapter = self.adapter
        body = {"model": adapter or self.facts.get("served"), "n": drawn, "logprobs": 0, "max_tokens": 16} | body
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        versioned, vocabulary = self.facts.get("tells_versions", False), self.facts.get("vocab_size")
        before = "" if versioned or adapter else self._whole_version()
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
                if versioned:
                    _ = [choice["weight_version"] for choice in choices_of_reply]
            return choices_of_reply * (n // drawn)

        with ThreadPoolExecutor(max_workers=max(min(len(prompts), AT_ONCE), 1)) as pool:
            answers = pool.map(ask, prompts, seeds or [None] * len(prompts), own or [{}] * len(prompts))
            choices = [choice for choices_of_reply in answers for choice in choices_of_reply]
        if versioned:
            return choices
        # The name of the adapter that the request selects contains the weight version.
        if adapter:
            return [choice | {"weight_version": adapter} for choice in choices]
        after = self._whole_version()
        if after != before:
            raise WeightSyncError(
                f"the weights of {self.base_url} changed from version {before} to {after} during sampling.",
                phase="reply",
                url=self.base_url,
            )
        return [choice | {"weight_version": after} for choice in choices]

    def _whole_version(self) -> str:
        version = self.weight_version()
        if version == INCOMPLETE:
            raise WeightSyncError(
                f"the weights of {self.base_url} are incomplete, because a push failed. Push all weights again.",
                phase="generate",
                url=self.base_url,
            )
        return version

    def time_for(self, tokens: int) -> float:
        """Return the timeout in seconds of a generation request with up to ``tokens`` tokens."""
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
        """Sample ``n`` completions per prompt. Arguments and result are compatible with TRL's client.

        Args:
            prompts: Texts or token ids.
            n: Number of completions per prompt.
            logprobs: Number of most likely tokens whose log-probs are returned at each position, in addition to the
                sampled token. 0: only the sampled token. None: no log-probs.
            structured_outputs_regex: Regular expression that completions must match.
            generation_kwargs: Additional fields of a request, such as ``seed``, ``stop`` and ``min_tokens``.
            sampling: ``temperature``, ``max_tokens``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``. The
                defaults do not change the distribution. The default of ``max_tokens`` is 16.

        Returns:
            A dict with the keys ``prompt_ids``, ``completion_ids``, ``logprobs``, ``logprob_token_ids``, ``finish_reasons`` and
            ``weight_versions``. The tokens of ``logprobs`` and ``logprob_token_ids`` are sorted by log-prob at each position.

        Raises:
            BadRequest: A field in ``generation_kwargs`` or ``sampling`` is unknown.
        """
        body = NEUTRAL | sampling | dict(generation_kwargs or {})
        # Check the names, because vLLM would silently ignore unknown fields.
        if unknown := sorted(body.keys() - NEUTRAL.keys() - FURTHER):
            raise BadRequest(f"{', '.join(unknown)}: unknown fields.", url=self.base_url)
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
        """Compute the log-probs of given sequences with the server's weights at temperature 1. Teachers and comparisons of
        weights use these log-probs.

        Each sequence is a separate request. Up to 16 requests are sent concurrently, and the server batches them.

        Args:
            sequences: Token ids, including prompts.
            prompt_lengths: Number of tokens at the start of each sequence that are not scored.
            top: Number of most likely tokens to return at every position. 0: return only the log-probs of the sequence's
                tokens.

        Returns:
            One `Scores` per sequence, with ``len(sequence) - prompt_length`` positions.

        Raises:
            ConfigError: ``sequences`` and ``prompt_lengths`` have different lengths.

        >>> scores = client.score([[1, 2, 3, 4]], [2], top=20)[0]  # doctest: +SKIP
        >>> scores.logps, scores.top_ids, scores.top_logps  # (2,), (2, 20), (2, 20)  # doctest: +SKIP
        """
        if len(sequences) != len(prompt_lengths):
            raise ConfigError(
                f"score got {len(sequences)} sequences, but {len(prompt_lengths)} prompt_lengths. Fix: pass one per sequence."
            )
        # Scoring needs one free position in the context, because vLLM always generates one token.
        most = int(self.facts.get("max_model_len") or 10**9) - 1

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

    # Methods that change or read the server's state.

    def reset_prefix_cache(self) -> None:
        """Clear the server's prefix cache.

        Raises:
            WeightSyncError: The server did not clear its prefix cache.
        """
        if self.call("POST", "/reset_prefix_cache").get("success") is False:
            raise WeightSyncError(f"{self.base_url} did not clear its prefix cache.", phase="end", url=self.base_url)

    def pause(self) -> None:
        """Pause generation. Running requests finish first, and new requests wait for `resume`."""
        self.call("POST", "/pause?mode=wait", timeout=self.sync_timeout, retries=3)

    def resume(self) -> None:
        """Resume generation after `pause`. The call has no effect if generation is not paused."""
        self.call("POST", "/resume", retries=3)

    # Methods that update the server's weights.

    def begin_update(self) -> None:
        """Pause generation and begin a weight update. Until `end_update`, the server reports its weights as incomplete.

        Raises:
            WeightSyncError: The server cannot receive weights.
        """
        why = self.facts.get("takes_no_weights")
        if self.facts.get("transfer") == "shared memory" and not self.is_local:
            why = "it receives weights through shared memory, but runs on another machine"
        if why:
            raise WeightSyncError(
                f"{self.base_url} cannot receive weights: {why}. Fix: start 'posttrain vllm-serve --model "
                f"{self.facts.get('model')}' on this machine. For a server on another machine, also pass "
                '--weight-transfer-config \'{"backend": "nccl"}\'.',
                phase="begin",
                url=self.base_url,
            )
        # Check the server's health first, because the timeouts of the later calls are longer. They would wait too long for
        # a server that hangs.
        self.health()
        # Stop sampling from the adapter. This update replaces all weights, or it replaces the base model before a new
        # adapter is loaded.
        self.adapter = ""
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
            # Another trainer may have ended during an update of this server. End that update first.
            self.call("POST", "/finish_weight_update", {}, timeout=self.sync_timeout)
            start()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter from a folder on this machine, and use it for sampling.

        Raises:
            WeightSyncError: The server supports no adapters, or it does not support the adapter's rank or parameter names.
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
        """Unload an adapter that is no longer used. Running requests with this adapter can finish."""
        with contextlib.suppress(RolloutServerError):
            self.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=QUICK_SECONDS)

    def send_part(self, **update_info: Any) -> None:
        """Send one message of a weight update to ``/update_weights``. The message describes a bucket in shared memory or
        the tensors of a broadcast, or it marks the end of the buckets.

        The request is not retried, because the server may already have received it.
        """
        self.call("POST", "/update_weights", {"update_info": update_info}, timeout=self.sync_timeout)

    def end_update(self, version: str) -> None:
        """End a weight update. The server checks that all weights have arrived, clears its caches, and resumes generation.

        Args:
            version: Name of the weights after the update.

        Raises:
            WeightSyncError: A weight is missing or unknown, or the server reports another version.
        """
        try:
            if self.communicator is None:
                self.send_part(complete=True)
            self.call("POST", "/finish_weight_update", {"weight_version": version}, timeout=self.sync_timeout)
            self.reset_prefix_cache()
            # Clear the server's cache of image features, because these features were computed with the old weights.
            if "placeholder" in self.facts and self.facts["engine"] == "vllm":
                self.call("POST", "/reset_encoder_cache")
        except WeightSyncError as error:
            error.phase = "end"
            raise
        confirmed = self.weight_version()
        if confirmed != version:
            raise WeightSyncError(
                f"{self.base_url} reports version {confirmed}, although version {version} was pushed.",
                phase="end",
                url=self.base_url,
            )
        self.resume()

    def abort_update(self) -> None:
        """Cancel a weight update. The server's weights remain incomplete. It samples again after the next
        complete update.
        """
        for path, body in (
            ("/update_weight_version", {"new_version": INCOMPLETE}),
            ("/finish_weight_update", {}),
            ("/resume", {}),
        ):
            try:
                self.call("POST", path, body, timeout=QUICK_SECONDS)
            except RolloutServerError as error:
                logger.info("%s did not accept the end of a failed update: %s", self.base_url, error)

    def init_communicator(self, device: torch.device | str = 0) -> None:
        """Join the server's NCCL group for weight updates, as TRL's client does. Requires vLLM and a separate
        GPU.
        """
        from posttrain.extensions.server.weight_sync import NcclSender

        self.communicator = NcclSender(self, device)

    def update_model_params(self, model: nn.Module, version: str | None = None) -> None:
        """Replace all weights of the server with the weights of a model. ``version`` is the new name of the weights. Later
        responses contain this name.
        """
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
        """Leave the NCCL group for weight updates. Repeated calls have no effect."""
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    def close(self) -> None:
        """Leave the group for weight updates, and close the connections."""
        self.close_communicator()
        self.session.close()


def _may_pass(error: BaseException) -> bool:
    """Return whether a retry may succeed. Return False after a timeout, because the retry would probably take as
    long as the first attempt.
    """
    return isinstance(error, ServerUnreachable | ServerBusy) and not error.timed_out
