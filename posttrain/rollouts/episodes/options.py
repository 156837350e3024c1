"""`HarnessFields`: options of configs for harnesses. `posttrain.extensions.agents` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.fields import Port, PositiveFloat, PositiveInt, option


@dataclass
class HarnessFields:
    """How the harness of a trainer is run; without one they do nothing."""

    harness_limit: PositiveInt = option(16, "Episodes of a harness that run at once.")
    harness_timeout: PositiveFloat | None = option(600.0, "Time limit of an episode in seconds. None: no limit.")
    harness_failure: float | None = option(
        None, "The reward of an episode that failed, which is trained; None: it is left out."
    )
    harness_sampling: Literal["refuse", "override"] = option(
        "refuse", "A call with other sampling settings than the run's: refuse it, or sample it with the run's."
    )
    harness_model: str = option("policy", "The name of the model that calls must give.")
    harness_host: str = option("127.0.0.1", "Address that the policy is served on to harnesses.")
    harness_port: Port = option(0, "Its port; 0: a free one.")
    harness_call_timeout: PositiveFloat = option(600.0, "Seconds a call may wait for its completion.")
    harness_max_calls: PositiveInt | None = option(
        None, "Calls of an episode; further ones are refused. None: no limit."
    )
    harness_max_tokens: PositiveInt | None = option(None, "Tokens sampled for an episode. None: no limit.")
    harness_env: list[str] | None = option(
        None,
        "Further environment variables that a harness command gets, by name or pattern (['AWS_*']; ['*'] passes all). None: "
        "those for paths, locale, proxies and certificates.",
    )
    harness_record: str | None = option(None, "File that every episode is appended to, for posttrain.replayed.")
