"""Registry of checks. Every check has a fixed code, a name, a moment at which it runs, and a page in the documentation.

A check has three components: a registered code and name (`register`), a function that runs at a given moment of a run
(`probe`), and the text of its finding (`finding`). New modules in this package need no registration, because `load` imports
all modules.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import posttrain.checks
from posttrain import plugins
from posttrain.errors import ConfigError, MissingDependencyError, PreflightError, check_choice, did_you_mean
from posttrain.redaction import hide_secrets
from posttrain.types import Finding
from posttrain.values import visible

if TYPE_CHECKING:
    from posttrain.types import Row

logger = logging.getLogger(__name__)


Moment = Literal["config", "data", "first_batch", "log_step"]
Severity = Literal["info", "warning", "error"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
CODE = re.compile(r"PT-([A-Z])\d{3}")

# Area of a check for each letter after ``PT-`` in its code.
AREAS = {
    "C": "configuration",
    "D": "data: rows and pairs",
    "B": "first batch",
    "T": "training metrics",
    "P": "preference training metrics",
    "R": "rollouts and rewards",
    "S": "rollout server",
    "M": "memory",
    "V": "versions",
    "K": "tokenizers and templates",
    "L": "locks, disks and ports",
    "G": "images",
}


@dataclass(frozen=True, slots=True)
class Check:
    """Registered check: its code, its name, and the moment at which it runs.

    Attributes:
        code: ``PT-`` with a letter of `AREAS` and three digits. A code is never reused.
        name: Name of the check, which consists of a few words joined by hyphens. ``silence_findings`` accepts the name or
            the code.
        moment: Moment at which the check runs.
        title: Short description of the problem.
        page: Page of the documentation below ``assumptions/``, such as ``"f"``.
        fatal: Whether the problem makes training or sampling impossible. A fatal problem is raised as an error where it
            occurs. It cannot be silenced.
    """

    code: str
    name: str
    moment: Moment
    title: str
    page: str = ""
    fatal: bool = False


@dataclass
class Context:
    """Information about a run for checks. If a value is not available at the moment of a check, the field is None or empty.

    Attributes:
        trainer: Command name of the trainer, such as ``"grpo"``.
        args: Config of the trainer.
        model_config: Config of the policy.
        model: The policy, if it is loaded.
        tokenizer: Tokenizer or processor.
        train_dataset, eval_dataset: The raw datasets.
        rows: Tokenized sample of the training set.
        sample: A `posttrain.checks.rows.RowSample` of the same ``rows`` with cached results of checks, if available.
        limit: Maximum length in tokens to which ``rows`` were truncated.
        peft_config: Config of the trained adapter.
        processes: Number of ranks.
        parts: Further arguments of the trainer (``reward_funcs``, ``teacher_model``, ...). The key is the argument's name.
    """

    trainer: str
    args: Any
    model_config: Any = None
    model: Any = None
    tokenizer: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    rows: Sequence[Row] = ()
    sample: Any = None
    limit: int | None = None
    peft_config: Any = None
    processes: int = 1
    parts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """Function that runs some checks on the main process, at a given moment of a run."""

    name: str
    moment: Moment
    codes: tuple[str, ...]
    function: Callable[[Context], Iterable[Finding | None]]
    part: str | None = None


REGISTRY: dict[str, Check] = {}
PROBES: dict[str, Probe] = {}


def register(code: str, name: str, *, moment: Moment, title: str, page: str = "", fatal: bool = False) -> Check:
    """Add a check to the registry.

    Raises:
        ConfigError: The code does not have the form of ``PT-D013``, or the code or the name already exists.
    """
    match = CODE.fullmatch(code)
    if match is None or match[1] not in AREAS:
        raise ConfigError(f"code={code!r} must be PT-, a letter of {''.join(AREAS)}, and three digits, e.g. PT-D013.")
    check_choice("moment", moment, MOMENTS)
    taken = next((check for check in REGISTRY.values() if check.code == code or check.name == name), None)
    if taken is not None:
        raise ConfigError(
            f"the check {code} {name!r} cannot be registered, because {taken.code} {taken.name!r} ({taken.title}) already has "
            "this code or name. Fix: choose a new code and a new name. Neither can be reused."
        )
    REGISTRY[code] = Check(code, name, moment, title, page, fatal)
    return REGISTRY[code]


def finding(code: str, severity: Severity, what: str, where: str, why: str, fix: str) -> Finding:
    """Create a finding of a check in the registry.

    Args:
        code: Code of the check.
        severity: ``error`` stops a run. It is used only for settings that cannot be intended. ``warning`` and ``info`` are
            logged.
        what: The problem, with its values.
        where: Location of the problem: rows, fields or a step.
        why: Consequence of the problem.
        fix: Advice for the user.

    Raises:
        ConfigError: The code is not registered.
    """
    if code not in REGISTRY:
        raise ConfigError(f"code={code!r} is not registered{did_you_mean(code, REGISTRY)}. Fix: call register() first.")
    # Escape control characters. These texts may contain text of dataset rows.
    return Finding(code, severity, *map(visible, (what, where, why, fix)))


def probe(moment: Moment, *codes: str, part: str | None = None) -> Callable[[Callable], Callable]:
    """Register a function that runs at a given moment of a run. All trainers and ``posttrain check`` call it.

    Args:
        moment: ``config`` (before the model is loaded), ``data`` (after the training set is prepared), or ``first_batch``.
        codes: Codes of all findings that the function can return.
        part: Name of an argument of the trainer (`Context.parts`). The function runs only if the run has this argument.

    >>> @probe("config", "PT-V001")  # doctest: +SKIP
    ... def versions(context: Context) -> Iterable[Finding]: ...
    """

    def add(function: Callable[[Context], Iterable[Finding | None]]) -> Callable:
        check_choice("moment", moment, MOMENTS)
        name = f"{function.__module__.removeprefix('posttrain.checks.')}.{function.__name__}"
        PROBES[name] = Probe(name, moment, codes, function, part)
        return function

    return add


def codes_of(area: str, moment: Moment) -> tuple[str, ...]:
    """Return the codes of an area (a letter of `AREAS`) that are checked at a given moment.

    >>> load()["PT-M003"].moment, codes_of("M", "first_batch")
    ('first_batch', ('PT-M003',))
    """
    return tuple(check.code for check in REGISTRY.values() if check.moment == moment and check.code[3] == area)


@functools.cache
def _import_checks() -> None:
    for module in pkgutil.iter_modules(posttrain.checks.__path__, "posttrain.checks."):
        importlib.import_module(module.name)
    for entry in plugins.entries("checks").values():
        try:
            plugins.load(entry)
        except MissingDependencyError as error:
            logger.warning("%s", error)


def load() -> dict[str, Check]:
    """Import all modules of this package, and the checks of plugins. Return the registry, sorted by code."""
    _import_checks()
    return dict(sorted(REGISTRY.items()))


def lookup(key: str) -> Check:
    """Return the check with this code or name. Ignore case.

    Raises:
        ConfigError: No check has this code or name. The error contains the closest match.
    """
    checks = load().values()
    for check in checks:
        if key.casefold() in (check.code.casefold(), check.name.casefold()):
            return check
    keys = [text for check in checks for text in (check.code, check.name)]
    raise ConfigError(
        f"{key!r} is neither the code nor the name of a check{did_you_mean(key, keys)}. docs/assumptions.md lists all checks."
    )


# Each item contains a check's code, its name, the moment at which it runs, its title and its documentation page.
CODES: tuple[tuple[str, str, Moment, str, str], ...] = (
    ("PT-C001", "train-half-precision", "config", "16-bit weights that the learning rate is too small to change", ""),
    ("PT-C004", "train-data-parallel", "config", "several GPUs or processes requested, but only one process runs", ""),
    ("PT-C005", "train-dense-mask", "config", "packed rows with a dense attention mask", ""),
    ("PT-D001", "data-id-out-of-range", "data", "token ids outside the vocabulary", "b"),
    ("PT-D002", "data-bos-double", "data", "rows that begin with two bos tokens", "b"),
    ("PT-D003", "data-eos-double", "data", "rows that end with two eos tokens", "b"),
    ("PT-D004", "data-eos-untrained", "data", "rows whose end-of-text token is not trained", "b"),
    ("PT-D005", "data-untrained-row", "data", "rows without a trained token", "b"),
    ("PT-D006", "data-empty-completion", "data", "empty completions", "b"),
    ("PT-D007", "data-duplicate", "data", "rows that repeat an earlier row", "b"),
    ("PT-D008", "data-first-token-whitespace-merge", "data", "prompts that end in a separate space token", "b"),
    ("PT-D009", "data-replacement-char", "data", "damaged text", "b"),
    ("PT-D010", "data-unknown-token", "data", "characters that the tokenizer cannot encode", "b"),
    ("PT-D011", "data-truncated", "data", "rows truncated at the limit", "b"),
    ("PT-D013", "data-pair-identical", "data", "chosen and rejected have the same tokens", "f"),
    ("PT-D014", "data-dropped", "data", "rows dropped during preparation", "b"),
    ("PT-D016", "data-control-tokens", "data", "control tokens in the text of a message", "b"),
    ("PT-D015", "data-prompt-diverged", "data", "prompts that tokenize differently with their completion", "b"),
    ("PT-D022", "pair-length-bias", "data", "one side of the pairs is nearly always longer", "f"),
    ("PT-D023", "pair-cut-one-side", "data", "only one answer of a pair is truncated", "f"),
    ("PT-D024", "pair-eos-one-side", "data", "only one side ends with an end-of-turn token", "f"),
    ("PT-D026", "label-contradiction", "data", "the same answer labeled good and bad", "f"),
    ("PT-D033", "pair-near-identical", "data", "chosen and rejected are nearly identical", "f"),
    ("PT-D034", "pair-against-scores", "data", "pairs that contradict their own scores", "f"),
    ("PT-D035", "pair-swapped", "data", "pairs that also appear with both sides swapped", "f"),
    ("PT-D036", "reward-model-agreement", "data", "agreement of a reward model with the labels", "f"),
    ("PT-D037", "pair-prompt-unread", "data", "pairs of text without a prompt, and a column that looks like one", "f"),
    ("PT-B001", "train-nothing-trained", "first_batch", "no parameter requires a gradient", ""),
    ("PT-B002", "train-gradient-not-finite", "first_batch", "a gradient of the first step is not finite", ""),
    ("PT-B003", "train-no-gradient", "first_batch", "no parameter got a gradient", ""),
    ("PT-T001", "train-no-trained-tokens", "log_step", "consecutive steps without a trained token", "b"),
    ("PT-T002", "train-padding", "log_step", "batches that are mostly padding", ""),
    ("PT-T003", "train-positions", "log_step", "a sequence longer than the model's maximum length", ""),
    ("PT-P001", "reference-mismatch", "first_batch", "policy and reference differ before the first update", "f"),
    ("PT-P002", "reference-prefers-rejected", "data", "the reference prefers nearly all rejected answers", "f"),
    ("PT-P003", "rewards-sink-together", "log_step", "chosen and rejected answers both become less likely", "f"),
    ("PT-P004", "margin-saturated", "log_step", "margins so large that the sigmoid has no gradient", "f"),
    ("PT-P005", "accuracy-below-half", "log_step", "the policy moves towards the rejected answers", "f"),
    ("PT-P006", "rewards-stay-zero", "log_step", "policy and reference stay equal", "f"),
    ("PT-P007", "eval-accuracy-below-half", "log_step", "the evaluation prefers the rejected answers", "f"),
    ("PT-R002", "online-groups-flat", "log_step", "nearly all groups have equal rewards", "j"),
    ("PT-R003", "online-length-grows", "log_step", "completions get longer while the reward does not change", "j"),
    ("PT-R004", "online-kl-grows", "log_step", "the policy moves far from its reference", "c"),
    ("PT-R005", "online-ratio-large", "log_step", "a token with a very large importance ratio", "c"),
    ("PT-R006", "online-clip-share", "log_step", "many tokens are clipped", "c"),
    ("PT-R007", "online-entropy-collapsed", "log_step", "the policy's entropy has collapsed", "j"),
    ("PT-R008", "online-completions-cut", "log_step", "completions end at the length limit", "j"),
    ("PT-R009", "online-duplicates", "log_step", "groups of identical completions", "j"),
    ("PT-R010", "online-correction-masks", "log_step", "the rollout correction masks many tokens", "c"),
    ("PT-R011", "online-logprobs-missing", "log_step", "the engine returned no log-probs", "c"),
    ("PT-R012", "online-no-gradient", "log_step", "steps without a gradient", "j"),
    ("PT-R014", "online-reward-never-applies", "log_step", "a reward function that never applies", "j"),
    ("PT-R016", "online-reward-nan", "log_step", "a reward function returned NaN", "j"),
    ("PT-R017", "online-reward-slow", "log_step", "the run waits for a reward function", ""),
    ("PT-R019", "online-reward-outlier", "log_step", "one reward far above all others", "j"),
    ("PT-R020", "online-reward-large", "log_step", "rewards so large that they scale up the steps", "j"),
    ("PT-R021", "online-overlong-unreachable", "config", "a length penalty that no completion can reach", "j"),
    ("PT-R022", "online-no-signal", "log_step", "many consecutive generations without a signal", "j"),
    ("PT-R032", "online-ids-without-token", "log_step", "sampled ids without a token in the tokenizer", "j"),
    ("PT-R033", "online-reward-constant", "log_step", "a reward function that never varies", "j"),
    ("PT-R028", "advantages-clipped", "log_step", "advantages far beyond the standard deviation of their group", "j"),
    ("PT-K001", "tokenizers-differ", "config", "token ids with different meanings in two models", "i"),
    ("PT-K002", "tokenizers-special", "config", "two models with different eos or pad tokens", "i"),
    ("PT-K003", "tokenizers-template", "config", "two chat templates that render differently", "i"),
    ("PT-K004", "tokens-without-embedding", "first_batch", "ids without an embedding in the model", "i"),
    ("PT-K005", "tokenizer-larger-than-model", "first_batch", "a tokenizer with more tokens than embeddings", "i"),
    ("PT-K006", "teacher-is-student", "config", "a teacher that is the student itself", "i"),
    ("PT-K101", "tokens-pad-stops", "config", "a pad token that also ends texts", ""),
    ("PT-K102", "tokens-no-pad", "config", "no pad token", ""),
    ("PT-K103", "tokens-stop-unknown", "config", "generation does not stop at the token that ends trained texts", ""),
    ("PT-K111", "template-bos-double", "data", "chat template and tokenizer both add bos", ""),
    ("PT-K112", "template-bos-missing", "data", "the chat template adds no bos", ""),
    ("PT-K113", "template-eos", "data", "the chat template ends turns without eos", ""),
    ("PT-K114", "template-mask", "data", "the chat template marks no answer tokens, or wrong ones", ""),
    ("PT-K115", "template-prefix", "data", "a conversation that is not a prefix of its continuation", ""),
    ("PT-K116", "template-reasoning-lost", "data", "the chat template drops reasoning", ""),
    ("PT-K117", "template-start", "data", "the answer mask begins at the wrong token", ""),
    ("PT-K118", "template-stop", "data", "the answer mask excludes the end of a turn", ""),
    ("PT-K119", "template-tools-lost", "data", "the chat template drops tool calls", ""),
    ("PT-K120", "template-tools-unread", "data", "the chat template drops the tools of a row", ""),
    ("PT-K121", "template-text-lost", "data", "the chat template drops the text of messages", ""),
    ("PT-G001", "images-do-not-fit", "data", "images and text longer than the context", "g"),
    ("PT-G002", "image-places", "data", "different numbers of images and image placeholders", "g"),
    ("PT-G003", "image-unreadable", "data", "images that cannot be read", "g"),
    ("PT-G004", "processor-of-another-model", "config", "a processor that belongs to another model", "g"),
    ("PT-G005", "images-do-not-reach", "first_batch", "log-probs that do not depend on the images", "g"),
    ("PT-G006", "tiny-images", "data", "images with a side below 32 pixels", "g"),
    ("PT-G007", "images-alike", "data", "the same image in most rows, or blank images", "g"),
    ("PT-G008", "placeholder-typed", "data", "text that contains an image placeholder", "g"),
    ("PT-G009", "odd-images", "data", "rotated, transparent, animated or unusual images", "g"),
    ("PT-G010", "remote-images", "data", "images given as URLs", "g"),
    ("PT-G011", "images-lost", "first_batch", "placeholders in a forward pass that do not match its images", "g"),
    ("PT-G012", "tower-without-gradient", "first_batch", "a trainable vision tower without a gradient", "g"),
    ("PT-G013", "template-loses-images", "data", "a chat template that writes other image placeholders", "g"),
    ("PT-G014", "images-encoded-again", "data", "JPEG files that dataset.map re-encoded as PNG", "g"),
    ("PT-G015", "exchanged-images", "log_step", "rollouts with another row's images", "g"),
    ("PT-G016", "engine-reads-otherwise", "config", "an engine that expands images differently", "g"),
    ("PT-G017", "images-not-needed", "log_step", "rewards that do not depend on the images", "g"),
    ("PT-L001", "folder-of-another-run", "config", "checkpoints of another run in output_dir", "k"),
    ("PT-L002", "disk-nearly-full", "config", "disk space for fewer than two checkpoints", "k"),
    ("PT-L003", "gpu-in-use", "config", "less free GPU memory than the optimizer needs", "k"),
    ("PT-L004", "port-in-use", "config", "a port of the run is in use", "k"),
    ("PT-M001", "weights-exceed-memory", "data", "weights and optimizer exceed the memory", "e"),
    ("PT-M002", "estimate-exceeds-memory", "data", "the longest step probably does not fit into memory", "e"),
    ("PT-M003", "dry-step-out-of-memory", "first_batch", "the longest step did not fit into memory", "e"),
    ("PT-M004", "memory-nearly-full", "log_step", "little memory left for longer samples", "l"),
    ("PT-M005", "memory-unused", "log_step", "much unused memory; micro-batches could be larger", "l"),
    ("PT-M006", "memory-fragmented", "log_step", "much reserved but unallocated memory", "l"),
    ("PT-M007", "ranks-uneven", "log_step", "all ranks wait for one slow rank", "l"),
    ("PT-M008", "generation-dominates", "log_step", "most of the step time is generation", "l"),
    ("PT-V001", "package-missing", "config", "a package that the config needs is not installed", "m"),
    ("PT-V002", "package-too-old", "config", "a package version that is too old or known to fail", "m"),
    ("PT-V003", "package-untested", "config", "a package version newer than the last tested one", "m"),
    ("PT-V005", "package-binaries", "config", "compiled packages built for another torch version", "m"),
    ("PT-D030", "bad-rows", "data", "rows that cannot be trained", "b"),
    ("PT-D031", "doubtful-rows", "data", "rows without an answer, or with blank or equal answers", "b"),
    ("PT-D032", "too-many-bad-rows", "data", "more bad rows than bad_rows_max allows", "b"),
    ("PT-R024", "policy-mismatch", "log_step", "the policy differs from the sampling policy", "c"),
    ("PT-R025", "rollouts-discarded", "log_step", "many rollouts are discarded as too old", "c"),
    ("PT-R026", "rollouts-at-the-bound", "log_step", "most rollouts are at the staleness bound", "c"),
    ("PT-R027", "reward-scales-apart", "log_step", "one reward is much larger than all others", "j"),
    ("PT-R029", "reward-column-missing", "data", "a reward function needs a missing column", "b"),
    ("PT-R031", "texts-without-partner", "log_step", "most of the text does not align with the teacher's tokens", "i"),
    ("PT-R030", "references-unread", "data", "reference answers that cannot be parsed", "d"),
    ("PT-S001", "server-other-model", "config", "the server's architecture differs from the trainer's", "a"),
    ("PT-S002", "server-small-vocabulary", "config", "the server's vocabulary is smaller than the trainer's", "a"),
    ("PT-S003", "server-other-revision", "config", "the server loaded another revision of the model", "a"),
    ("PT-S004", "server-weights-differ", "first_batch", "log-probs differ after the weight push", "a"),
    ("PT-S005", "server-push-unproved", "first_batch", "the server already had the weights before the push", "a"),
    ("PT-S010", "server-short-context", "config", "completions do not fit the server's context", "h"),
    ("PT-S011", "server-raw-logprobs", "config", "the server's log-probs ignore the temperature", "h"),
    ("PT-S012", "server-takes-no-weights", "config", "the server cannot receive weights", "h"),
    ("PT-S013", "server-on-this-device", "config", "server and trainer share an accelerator", "h"),
    ("PT-S014", "server-few-slots", "config", "the server generates few completions concurrently", "h"),
    ("PT-S015", "server-quantised", "config", "the server runs quantized weights", "h"),
    ("PT-S017", "server-seeds-in-pieces", "config", "seeds would crash vLLM on this CPU", "h"),
    ("PT-T005", "train-gradient-spikes", "log_step", "steps with a much larger gradient than usual", ""),
)

# Codes of problems that are raised as errors where they occur. Such rows or models cannot be trained at all.
FATAL = ("PT-G002", "PT-G004", "PT-G008", "PT-G011", "PT-G013", "PT-G015", "PT-G016")

for code, name, moment, title, page in CODES:
    register(code, name, moment=moment, title=title, page=page, fatal=code in FATAL)


MODES = ("error", "warn", "off")
REPEATED = 100  # A finding is logged at its first occurrence, and then at every 100th occurrence.
KEPT = 20  # Maximum number of recorded findings per code. Further findings are only counted.
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.WARNING}

Outcome = Literal["reported", "repeated", "silenced", "off"]


def silenced_codes(silence: Mapping[str, str] | None) -> dict[str, str]:
    """Validate ``silence_findings``. Return the reason for each silenced code.

    Args:
        silence: Reason for each silenced check. The key is the check's code or name.

    Raises:
        ConfigError: A code or name does not exist, a check is fatal, or a reason is empty.

    >>> silenced_codes({"data-pair-identical": "a control group"})
    {'PT-D013': 'a control group'}
    """
    codes: dict[str, str] = {}
    for key, reason in (silence or {}).items():
        check = lookup(str(key))
        if check.fatal:
            raise ConfigError(
                f"silence_findings[{key!r}]: {check.code} ({check.title}) cannot be silenced, because affected rows cannot be "
                "trained or sampled. Fix: remove it from silence_findings, and follow the fix in the error that stops the run."
            )
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(
                f"silence_findings[{key!r}]={reason!r} must be a reason. Fix: write why {check.code} ({check.title}) is not a "
                "problem in this run. The reason is saved in preflight.json."
            )
        codes[check.code] = reason.strip()
    return codes


def describe(finding: Finding) -> str:
    """Format a finding as one line: code, problem, location, consequence, fix, and the name for ``silence_findings``."""
    name = f" [{REGISTRY[finding.code].name}]" if finding.code in REGISTRY else ""
    return f"{finding.code}: {finding.what} ({finding.where}): {finding.why} Fix: {finding.fix}{name}"


@dataclass
class Result:
    """Result of one check in a run.

    Attributes:
        runs: Number of times the check ran.
        seconds: Duration of the check. If one function implements several checks, its duration is divided equally among
            them.
        findings: Findings with their numbers of occurrences.
        failed: Error message of the check, if it raised an error.
    """

    runs: int = 0
    seconds: float = 0.0
    findings: dict[tuple[str, str], tuple[Finding, int]] = field(default_factory=dict)
    failed: str = ""

    @property
    def outcome(self) -> str:
        """Outcome of the check: ``found``, ``nothing found``, ``could not look`` or ``not looked for``."""
        if self.findings:
            return "found"
        if self.failed:
            return "could not look"
        return "nothing found" if self.runs else "not looked for"


class Preflight:
    """Runs the checks of a run at four moments, and records their results.

    Args:
        mode: ``error`` raises an error for findings of severity error. ``warn`` only logs findings. ``off`` runs no checks.
        silence: Reason for each check whose findings are not logged. The key is the check's code or name.

    >>> preflight = Preflight()
    >>> preflight.add(Finding("PT-T002", "warning", "w", "here", "y", "f"))
    'reported'
    >>> preflight.add(Finding("PT-T002", "warning", "w", "here", "y", "f"))
    'repeated'
    """

    def __init__(self, mode: str = "error", silence: Mapping[str, str] | None = None) -> None:
        check_choice("preflight", mode, MODES)
        load()
        self.mode = mode
        self.silenced = silenced_codes(silence)
        self.results: dict[str, Result] = {}
        self.seconds: dict[str, float] = {}
        self.reported: list[Finding] = []
        self.notes: dict[str, Any] = {}  # Additional fields of preflight.json.
        # Whether the report has changed since the file was written.
        self.changed = True

    @property
    def active(self) -> bool:
        """Whether checks run."""
        return self.mode != "off"

    @contextmanager
    def record_check(self, moment: Moment, codes: Collection[str]) -> Iterator[None]:
        """Record the code in a ``with`` block as one run of the checks with these codes."""
        if not self.active:
            yield
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            new = any(self.results.get(code, Result()).runs == 0 for code in codes)
            self.seconds[moment] = self.seconds.get(moment, 0.0) + spent
            for code in codes:
                result = self.results.setdefault(code, Result())
                result.runs += 1
                result.seconds += spent / len(codes)
            self.changed = self.changed or new or moment != "log_step"

    def has(self, moment: Moment, context: Context) -> bool:
        """Return whether there are checks for this run at a given moment."""
        return any(self._concerns(probe, moment, context) for probe in PROBES.values())

    @staticmethod
    def _concerns(probe: Probe, moment: Moment, context: Context) -> bool:
        return probe.moment == moment and (probe.part is None or context.parts.get(probe.part) is not None)

    def run(self, moment: Moment, context: Context) -> list[Finding]:
        """Run the checks of a given moment, and return their findings. If a check itself fails, its error is logged. Only a
        `PreflightError` or a `ConfigError` is raised.
        """
        findings: list[Finding] = []
        for probe in list(PROBES.values()) if self.active else ():
            if not self._concerns(probe, moment, context):
                continue
            try:
                with self.record_check(moment, probe.codes):
                    findings += [finding for finding in probe.function(context) if finding is not None]
            except (PreflightError, ConfigError):
                raise
            except Exception as error:  # A bug in a check must not stop a run.
                reason = hide_secrets(f"{type(error).__name__}: {error}")
                for code in probe.codes:
                    self.results[code].failed = reason
                logger.warning("the checks %s failed with an error: %s", ", ".join(probe.codes), reason)
        return findings

    def add(self, finding: Finding) -> Outcome:
        """Record a finding. Return whether it is new, repeated or silenced. Based on the result, the caller decides whether
        to log the finding.
        """
        if not self.active:
            return "off"
        result = self.results.setdefault(finding.code, Result())
        key = (finding.where, finding.severity)
        latest, count = result.findings.get(key, (finding, 0))
        if count or len(result.findings) < KEPT:
            result.findings[key] = (latest, count + 1)
        if finding.code in self.silenced:
            self.changed = True
            return "silenced"
        if count % REPEATED:
            return "repeated"
        self.changed = True
        self.reported.append(finding)
        return "reported"

    def refuses(self, finding: Finding) -> bool:
        """Return whether a finding stops the run."""
        return finding.severity == "error" and self.mode == "error" and finding.code not in self.silenced

    def report(self, findings: Iterable[Finding | None], *, log: bool = True) -> list[Finding]:
        """Log findings. Repeated findings are logged every 100th time. If some findings are errors, raise an error.

        Args:
            findings: Findings. Findings that are None are ignored.
            log: Whether this process logs the findings. False if another process logs them.

        Returns:
            Findings that were logged.

        Raises:
            PreflightError: Some findings have severity error, and ``mode`` is ``error``. The message lists all of them.
        """
        reported, refused = [], []
        for finding in findings:
            if finding is None:
                continue
            outcome = self.add(finding)
            if self.active and self.refuses(finding):
                refused.append(finding)
                reported.append(finding)
            elif outcome == "reported":
                reported.append(finding)
                if log:
                    logger.log(LEVELS[finding.severity], "%s", describe(finding))
        if refused:
            raise refusal(refused)
        return reported

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``preflight.json``."""
        checks = load()
        rows = []
        for code in sorted({*self.results, *self.silenced}):
            # The registry does not contain checks that users define.
            check, result = checks.get(code), self.results.get(code, Result())
            row: dict[str, Any] = {
                "code": code,
                "name": check and check.name,
                "moment": check and check.moment,
                "runs": result.runs,
            }
            row["outcome"] = result.outcome
            row["seconds"] = round(result.seconds, 6)
            row["findings"] = [asdict(finding) | {"times": count} for finding, count in result.findings.values()]
            if code in self.silenced:
                row["silenced"] = self.silenced[code]
            if result.failed:
                row["failed"] = result.failed
            rows.append(row)
        return {
            "preflight": self.mode,
            "seconds": {moment: round(spent, 6) for moment, spent in self.seconds.items()},
            "checks": rows,
            **self.notes,
        }


def refusal(findings: Sequence[Finding]) -> PreflightError:
    """Create the error that stops a run. Its message lists all findings."""
    listed = describe(findings[0]) if len(findings) == 1 else "".join(f"\n- {describe(f)}" for f in findings)
    first = findings[0].code
    error = PreflightError(
        f"{listed}\nTo continue anyway, set preflight='warn', or silence_findings={{{first!r}: 'why this is not a problem'}}."
    )
    error.findings = list(findings)
    return error
