"""`HarnessFields`: config options for harnesses. `posttrain.extensions.agents` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.fields import Port, PositiveFloat, PositiveInt, option


@dataclass
class HarnessFields:
    """Config options for runs with a harness. They have no effect in runs without a harness."""

    harness_limit: PositiveInt = option(16, "Maximum number of episodes that run at the same time.")
    harness_timeout: PositiveFloat | None = option(
        600.0, "Maximum number of seconds of an episode. A longer episode counts as failed. None: no limit."
    )
    harness_failure: float | None = option(
        None, "Reward of a failed episode. None: failed episodes are excluded from training."
    )
    harness_sampling: Literal["refuse", "override"] = option(
        "refuse",
        "How to treat a call whose sampling settings differ from the run's settings. 'refuse': reject the call. 'override': "
        "sample with the run's settings, so that the log-probs of the loss are correct.",
    )
    harness_model: str = option("policy", "Name of the model that calls must request. Other names are rejected.")
    harness_host: str = option(
        "127.0.0.1",
        "Address on which the policy is served to the harness. If the harness runs on another machine, set an address that "
        "this machine can reach.",
    )
    harness_port: Port = option(0, "Port on which the policy is served to the harness. 0 selects a free port.")
    harness_call_timeout: PositiveFloat = option(600.0, "Timeout in seconds of a call to the policy.")
    harness_max_calls: PositiveInt | None = option(
        None, "Maximum number of calls per episode. Further calls are rejected. None: no limit."
    )
    harness_max_tokens: PositiveInt | None = option(
        None, "Maximum number of tokens sampled per episode. After that, further calls are rejected. None: no limit."
    )
    harness_env: list[str] | None = option(
        None,
        "Additional environment variables that a harness command receives, as names or patterns. ['AWS_*'] passes all "
        "variables that match the pattern, and ['*'] passes all variables. None: only the variables for paths, locale, "
        "proxies and certificates.",
    )
    harness_record: str | None = option(
        None,
        "File to which episodes are appended, for replay with posttrain.replayed. None: episodes are not recorded.",
    )
