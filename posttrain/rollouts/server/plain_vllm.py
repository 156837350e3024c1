"""A server that ``vllm serve`` started, spoken to as if it were ours: what it cannot do is refused with the command that can."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2

from posttrain.errors import (
    BadRequest,
    ConfigError,
    RolloutServerError,
    ServerBusy,
    ServerUnreachable,
    WeightSyncError,
)
from posttrain.rollouts.server.client import GENERATE_TIMEOUT, PAUSE_TIMEOUT, QUICK, Connection, VLLMClient
from posttrain.rollouts.server.replies import (
    TOGETHER,
    reply_of,
    request_fields,
    request_parts,
    scores_of,
    shape_of,
)
from posttrain.rollouts.vllm_worker import EXTENSION, restart_command
from posttrain.rollouts.workers.shared_weights import HostLock

__all__ = ["PlainVLLMClient", "connect_client"]

logger = logging.getLogger(__name__)

INCOMPLETE = "incomplete"  # Name of the weights while a push is under way, and after one that failed.


def connect_client(base_url: str, **options: Any) -> VLLMClient:
    """The client that fits the server at an address; one that is not there yet counts as ours.

    Args:
        base_url: ``http://host:port``.
        options: Of `VLLMClient`.
    """
    asked = Connection(base_url, api_key=options.get("api_key"))
    try:
        # Ours has no such path; vLLM's answers without a token.
        plain = isinstance(asked.call("GET", "/version", timeout=QUICK).get("version"), str)
    except RolloutServerError:
        plain = False
    finally:
        asked.session.close()
    return PlainVLLMClient(base_url, **options) if plain else VLLMClient(base_url, **options)


class PlainVLLMClient(VLLMClient):
    """Talks to one server that ``vllm serve`` started.

    Completions come from ``/v1/completions`` by token ids. Weights are pushed through shared memory of one machine, to a
    server in developer mode with our worker extension (`restart_command`); another only samples. vLLM keeps no lease: a lock
    file on this machine keeps other trainers of this machine away.

    Args:
        base_url: ``http://host:port``.
        options: Of `VLLMClient`.
    """

    def __init__(self, base_url: str, **options: Any) -> None:
        self._lock = HostLock(base_url.rstrip("/"))
        self._facts: dict[str, Any] = {}
        self._developer: bool | None = None
        super().__init__(base_url, **options)
        self.card: Mapping[str, Any] = self._card()

    def _card(self) -> Mapping[str, Any]:
        """Of the model that is served.

        Raises:
            RolloutServerError: There is none.
        """
        cards = self._request("GET", "/v1/models", timeout=QUICK, retries=2)
        served = [card for card in cards.get("data", []) if card.get("parent") is None]
        if not served:
            raise RolloutServerError(f"{self.base_url} serves no model: {cards}.", url=self.base_url)
        return served[0]

    # What it is --------------------------------------------------------------------------------------------------------

    def _content(self, response: httpx2.Response) -> Any:
        return response.json() if response.content else {}  # Health and others answer nothing but 200.

    def _request(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        return super().call(method, path, body, **options)

    def health(self, deep: bool = False) -> dict[str, Any]:
        """See `VLLMClient.health`."""
        self._request("GET", "/health", timeout=QUICK)
        if deep:
            self.generate([[1]], max_tokens=1, temperature=0.0)
        return {"status": "ok"}

    def weight_version(self) -> int | None:
        """The version that was pushed last; 0: those it loaded; None: it does not say.

        Raises:
            WeightSyncError: They are not whole: a push failed midway.
        """
        if self._developer is False:
            return None
        try:
            told = str(self._request("GET", "/weight_info", timeout=QUICK, retries=2).get("weight_version"))
        except ServerUnreachable:
            raise
        except RolloutServerError:
            self._developer = False
            return None
        self._developer = True
        if told == INCOMPLETE:
            raise WeightSyncError(
                f"the weights of {self.base_url} are not whole: a push failed midway. Push all of them again.",
                phase="generate", url=self.base_url,
            )  # fmt: skip
        return int(told) if told.isdigit() else 0

    def info(self) -> dict[str, Any]:
        """What a server of ours says of itself, as far as it can be known; ``takes_no_weights`` says what is missing."""
        version: int | None = 0
        with contextlib.suppress(WeightSyncError):
            version = self.weight_version()
        self.card = self._card()
        self._facts = self._model_facts()
        return {
            "engine": "vllm serve",
            "model": self.card.get("root") or self.card["id"],
            "max_model_len": self.card.get("max_model_len"),
            "vllm_version": self._request("GET", "/version", timeout=QUICK, retries=2).get("version"),
            "accepts_lora": False,
            "scores": True,
            "weight_version": version,
            "restart": restart_command(self.card.get("root"), self._facts.get("device") == "cpu"),
        } | self._facts

    def _model_facts(self) -> dict[str, Any]:
        """By the worker extension; without it, what the model's folder says where it lies on this machine."""
        if self._developer:
            try:
                return self._rpc("posttrain_facts") | {"accepts_weights": True}
            except RolloutServerError:
                missing = f"it runs without --worker-extension-cls {EXTENSION}"
        else:
            missing = "it runs without VLLM_SERVER_DEV_MODE=1"
        return self._folder_facts() | {"accepts_weights": False, "takes_no_weights": missing}

    def _folder_facts(self) -> dict[str, Any]:
        from transformers import AutoConfig

        if not self.is_local or not self.card.get("root"):
            return {}
        try:
            config = AutoConfig.from_pretrained(self.card["root"], local_files_only=True)
        except (OSError, ValueError):
            return {}
        text = config.get_text_config()
        return {
            "architectures": list(config.architectures or []) or None,
            **shape_of(text),
            "vocab_size": text.vocab_size,
        }

    def get_world_size(self) -> int:
        """Workers that take part in a weight update; 1 where it does not say."""
        return int(self._developers("GET", "/get_world_size")["world_size"]) if self.weight_version() is not None else 1

    # Generation --------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        images: Sequence[Any] | None = None,
        *,
        n: int = 1,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        request_id: str | None = None,
        retries: int = 3,
        **fields: Any,
    ) -> dict[str, Any]:
        """See `VLLMClient.generate`; ``raw_logprobs`` are not known to it, and a repeated request is computed anew.

        Raises:
            BadRequest: Images, or settings that vLLM does not have.
        """
        if images is not None and any(images):
            raise BadRequest(f"{self.base_url}: images are sent to 'posttrain serve' alone, or to vLLM in process.")
        drawn = 1 if fields.get("temperature") == 0 else n  # vLLM refuses several of what can only be one.
        body = {"model": self.card["id"], "n": drawn, "max_tokens": max_tokens, "logprobs": logprobs or 0}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True} | request_fields(fields, self.base_url)
        before = self.weight_version()  # Raises where a failed push left weights that must not be sampled from.
        parts = request_parts(prompts, fields.get("seed"))
        timeout = self.time_for(len(prompts) * n * max_tokens)

        def ask(part: tuple[list[Any], int | None]) -> list[dict[str, Any]]:
            sent = body | {"prompt": part[0]} | ({} if part[1] is None else {"seed": part[1]})
            reply = self._request("POST", "/v1/completions", sent, timeout=timeout, retries=retries)
            return [choice for choice in self._choices(reply, part[0], drawn) for _ in range(n // drawn)]

        with ThreadPoolExecutor(max_workers=max(min(len(parts), TOGETHER), 1)) as pool:
            choices = [choice for found in pool.map(ask, parts) for choice in found]
        version = self.weight_version()
        if version != before:
            raise WeightSyncError(
                f"the weights of {self.base_url} changed from version {before} to {version} while it sampled.",
                phase="reply", version=version, url=self.base_url,
            )  # fmt: skip
        return reply_of(choices, n, logprobs, version)

    def _choices(self, reply: dict[str, Any], prompts: list[Any], n: int) -> list[dict[str, Any]]:
        """The answer's completions, each shown to be of its prompt.

        Raises:
            RolloutServerError: Too few, other prompts, or no token ids.
        """
        found = sorted(reply.get("choices") or [], key=lambda choice: choice.get("index", 0))
        owners = [prompt for prompt in prompts for _ in range(n)]
        what = None
        if len(found) != len(owners):
            what = f"sent {len(found)} completions for {len(prompts)} prompts x {n}"
        elif any(c.get("token_ids") is None or (c.get("logprobs") or {}).get("token_logprobs") is None for c in found):
            what = "sends no token ids or no log-probs: it is older than vLLM 0.10.2, or not vLLM"
        elif any(len(c["token_ids"]) != len(c["logprobs"]["token_logprobs"]) for c in found):
            what = "sent other numbers of log-probs than of tokens"
        elif any(not isinstance(p, str) and c.get("prompt_token_ids") != p for c, p in zip(found, owners, strict=True)):
            what = "answered other prompts than it was asked"
        if what is not None:
            raise RolloutServerError(f"{self.base_url} {what}: its answer cannot be used.", url=self.base_url)
        return found

    def chat(self, messages: Any, **_: Any) -> dict[str, Any]:
        """Not offered: the trainer's template renders conversations."""
        raise NotImplementedError("a plain vLLM server is asked by token ids alone; render the prompts and generate.")

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        *,
        top_logprobs: int = 1,
        temperature: float = 1.0,
        chunk_size: int = 0,
        max_concurrent_requests: int = 4,
    ) -> dict[str, Any]:
        """See `VLLMClient.get_sequence_logprobs`; vLLM knows them at temperature 1 alone.

        Raises:
            ConfigError: Another temperature, or lists of unequal length.
        """
        if temperature != 1.0:
            raise ConfigError(
                f"temperature={temperature}: vLLM gives log-probs of given sequences at temperature 1 alone."
            )
        if len(sequences) != len(prompt_lengths):
            raise ConfigError(f"{len(sequences)} sequences and {len(prompt_lengths)} prompt_lengths: give one of each.")
        most = int(self.card.get("max_model_len") or 10**9) - 1  # One token is generated too, and must fit.

        def score(ids: Sequence[int]) -> list[Any]:
            body = {
                "model": self.card["id"],
                "prompt": list(ids)[:most],
                "max_tokens": 1,
                "prompt_logprobs": top_logprobs,
            }
            reply = self._request("POST", "/v1/completions", body, timeout=GENERATE_TIMEOUT, retries=3)
            return reply["choices"][0]["prompt_logprobs"]

        with ThreadPoolExecutor(max_workers=max_concurrent_requests) as pool:
            known = list(pool.map(score, sequences))
        return scores_of(sequences, prompt_lengths, known, top_logprobs) | {"weight_version": self.weight_version()}

    # State -------------------------------------------------------------------------------------------------------------

    def _developers(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """An endpoint of vLLM's developer mode.

        Raises:
            RolloutServerError: It is off.
        """
        if self.weight_version() is None:
            raise RolloutServerError(
                f"{self.base_url} is a vLLM server without {path.split('?')[0]}. Restart it: "
                f"{restart_command(self.card.get('root'))}", url=self.base_url,
            )  # fmt: skip
        return self._request(method, path, body, **({"timeout": PAUSE_TIMEOUT} | options))

    def reset_prefix_cache(self) -> None:
        """See `VLLMClient.reset_prefix_cache`."""
        if self._developers("POST", "/reset_prefix_cache").get("success") is False:
            raise RolloutServerError(f"{self.base_url} refused to forget keys and values.", url=self.base_url)

    def pause(self, mode: str = "keep") -> None:
        """See `VLLMClient.pause`."""
        self._developers("POST", f"/pause?mode={mode}")

    def resume(self) -> None:
        """See `VLLMClient.resume`."""
        self._developers("POST", "/resume")

    def sleep(self, level: int = 1) -> None:
        """See `VLLMClient.sleep`."""
        self._developers("POST", f"/sleep?level={level}")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `VLLMClient.wake_up`."""
        self._developers("POST", "/wake_up" + "".join(f"{'&' if i else '?'}tags={t}" for i, t in enumerate(tags or ())))

    def lease(self, holder: str, ttl_s: float = 90.0) -> str:
        """A lock file of this machine: vLLM itself would let any trainer push.

        Raises:
            ServerBusy: Another process of this machine holds it.
        """
        other = self._lock.acquire(holder)
        if other is not None:
            text = f"{self.base_url} is used by {other} on this machine. Give each trainer its own."
            raise ServerBusy(text, held=True, url=self.base_url)
        logger.warning("%s is a plain vLLM server: trainers of other machines are not kept from it.", self.base_url)
        return "lock file"

    def renew(self) -> None:
        """A lock file does not lapse."""

    def release(self) -> None:
        """See `VLLMClient.release`."""
        self._lock.release()

    # Weights -----------------------------------------------------------------------------------------------------------

    def init_communicator(self, device: Any = 0) -> None:
        """Not offered.

        Raises:
            WeightSyncError: Always.
        """
        raise WeightSyncError(
            f"{self.base_url} is a plain vLLM server, which is pushed to through shared memory of its machine alone. Serve with "
            f"'posttrain serve --engine vllm --model {self.card.get('root')}' to send weights to other machines.",
            phase="init", url=self.base_url,
        )  # fmt: skip

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """See `Connection.call`; an update's requests become calls of the worker extension."""
        step = {
            "/begin_update/": self._begin, "/update_bucket/": self._bucket, "/end_update/": self._end,
            "/abort_update/": self._abort,
        }.get(path)  # fmt: skip
        return super().call(method, path, body, **options) if step is None else step(body)

    def _rpc(self, method: str, **kwargs: Any) -> dict[str, Any]:
        """A method of the extension on every worker; the first one's answer, with what any of them misses."""
        body = {"method": method, "kwargs": kwargs}
        results = self._request("POST", "/collective_rpc", body, timeout=self.sync_timeout).get("results") or [{}]
        missing = sorted({name for result in results for name in result.get("missing", ())})
        return results[0] | ({"missing": missing} if "missing" in results[0] else {})

    def _begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        info = self.info()
        why = info.get("takes_no_weights")
        if why or body.get("adapter"):
            raise WeightSyncError(
                f"{self.base_url} takes no adapters: set vllm_lora_sync='merge'." if not why else
                f"{self.base_url} is a vLLM server that takes no weights: {why}. Restart it: {info['restart']} (on the "
                "trainer's machine); or, on any machine, posttrain serve --engine vllm.",
                phase="begin", version=body["version"], url=self.base_url,
            )  # fmt: skip
        # Asked directly, also below: `_developers` refuses weights that are not whole.
        self._request("POST", "/pause?mode=wait", timeout=PAUSE_TIMEOUT)
        self._request("POST", "/update_weight_version", {"new_version": INCOMPLETE}, timeout=QUICK)
        return self._rpc("posttrain_begin")

    def _bucket(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, Mapping):
            raise WeightSyncError(
                f"{self.base_url} is a plain vLLM server, which takes weights through shared memory of its own machine alone. "
                "Serve with 'posttrain serve --engine vllm' there.", phase="bucket", url=self.base_url,
            )  # fmt: skip
        return self._rpc("posttrain_bucket", path=body["path"], digest=body["checksum"], size=body.get("size"))

    def _end(self, body: Mapping[str, Any]) -> dict[str, Any]:
        result = self._rpc("posttrain_end")
        if self._request("POST", "/reset_prefix_cache", timeout=PAUSE_TIMEOUT).get("success") is False:
            raise WeightSyncError(
                f"{self.base_url} refused to forget keys and values of the earlier weights.",
                phase="end", version=body["version"], url=self.base_url,
            )  # fmt: skip
        self._request("POST", "/update_weight_version", {"new_version": str(body["version"])}, timeout=QUICK)
        self.resume()
        return result | {"version": body["version"], "unexpected": []}

    def _abort(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._facts.get("accepts_weights"):
            self._rpc("posttrain_abort")
            self._request("POST", "/resume", timeout=PAUSE_TIMEOUT)
        return {}
