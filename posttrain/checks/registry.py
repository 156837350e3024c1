"""The register of checks: every finding has a stable code, a name, the moment it is looked for, and a page about it.

A check is three things: a line in the register (`register`), a function that looks (`probe` says at which moment), and what
it says when it found something (`finding`). A new module in this package joins by being there: `load` imports them all.
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
from posttrain.errors import ConfigError, PreflightError, check_choice, did_you_mean
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

# The letter of a code says what it is about.
AREAS = {
    "C": "configuration",
    "D": "data: rows and pairs",
    "B": "first batch",
    "T": "signs of training",
    "P": "signs of preference training",
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
    """One line of the register.

    Attributes:
        code: ``PT-`` with a letter of `AREAS` and three digits; never used again for something else.
        name: A few words with hyphens; silencing takes it in place of the code.
        moment: When it is looked for.
        title: What is wrong when it fires, in a few words.
        page: Page of the documentation below ``assumptions/``, such as ``"f"``.
        fatal: What it finds cannot be trained or sampled: it is raised where it is met, and cannot be silenced.
    """

    code: str
    name: str
    moment: Moment
    title: str
    page: str = ""
    fatal: bool = False


@dataclass
class Context:
    """What is known of a run at a moment; None (or empty) where it is not known yet.

    Attributes:
        trainer: The trainer's command name, such as ``"grpo"``.
        args: The trainer's config.
        model_config: Configuration of the policy.
        model: The policy, where it is loaded.
        tokenizer: Tokenizer or processor.
        train_dataset, eval_dataset: As they were given.
        rows: A sample of the training set, tokenised.
        sample: The same rows with what their checks find (`posttrain.checks.rows.RowSample`), where that is shared.
        limit: Tokens at which those rows were cut.
        peft_config: Of an adapter that is trained.
        processes: Ranks of the run.
        parts: What else the trainer was given, by argument name (``reward_funcs``, ``teacher_model``, ...).
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
    """A function that looks for some findings at a moment, on the main process."""

    name: str
    moment: Moment
    codes: tuple[str, ...]
    function: Callable[[Context], Iterable[Finding | None]]
    part: str | None = None


REGISTRY: dict[str, Check] = {}
PROBES: dict[str, Probe] = {}


def register(code: str, name: str, *, moment: Moment, title: str, page: str = "", fatal: bool = False) -> Check:
    """Add a line to the register.

    Raises:
        ConfigError: The code is not of the form ``PT-D013``, or code or name are taken.
    """
    match = CODE.fullmatch(code)
    if match is None or match[1] not in AREAS:
        raise ConfigError(f"code={code!r} must be PT-, a letter of {''.join(AREAS)} and three digits, as PT-D013 is.")
    check_choice("moment", moment, MOMENTS)
    taken = next((check for check in REGISTRY.values() if check.code == code or check.name == name), None)
    if taken is not None:
        raise ConfigError(
            f"a check {code} {name!r} cannot be registered: {taken.code} {taken.name!r} is ({taken.title}). Codes and names "
            "are never used twice."
        )
    REGISTRY[code] = Check(code, name, moment, title, page, fatal)
    return REGISTRY[code]


def finding(code: str, severity: Severity, what: str, where: str, why: str, fix: str) -> Finding:
    """What a registered check saw.

    Args:
        code: Of the register.
        severity: ``error`` stops a run (only for what cannot be meant), ``warning`` and ``info`` are told.
        what: What is wrong, with the values.
        where: Rows, fields, a step.
        why: What comes of it.
        fix: What to do.

    Raises:
        ConfigError: The code is not registered.
    """
    if code not in REGISTRY:
        raise ConfigError(f"code={code!r} is not registered{did_you_mean(code, REGISTRY)}: register it first.")
    return Finding(code, severity, *map(visible, (what, where, why, fix)))  # They may quote rows.


def probe(moment: Moment, *codes: str, part: str | None = None) -> Callable[[Callable], Callable]:
    """Have a function called at a moment, by every trainer and by ``posttrain check``.

    Args:
        moment: ``config`` (before the model is loaded), ``data`` (the training set is prepared), ``first_batch``.
        codes: All that it may find.
        part: Called only for runs with this part (`Context.parts`).

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
    """Codes of one letter of `AREAS` that are looked for at a moment.

    >>> load()["PT-M003"].moment, codes_of("M", "first_batch")
    ('first_batch', ('PT-M003',))
    """
    return tuple(check.code for check in REGISTRY.values() if check.moment == moment and check.code[3] == area)


@functools.cache
def _import_checks() -> None:
    for module in pkgutil.iter_modules(posttrain.checks.__path__, "posttrain.checks."):
        importlib.import_module(module.name)


def load() -> dict[str, Check]:
    """Import every module of this package, so that the register is whole; returns it in the order of codes."""
    _import_checks()
    return dict(sorted(REGISTRY.items()))


def lookup(key: str) -> Check:
    """The check with this code or name, in any case.

    Raises:
        ConfigError: There is none; the closest is named.
    """
    checks = load().values()
    for check in checks:
        if key.casefold() in (check.code.casefold(), check.name.casefold()):
            return check
    known = [text for check in checks for text in (check.code, check.name)]
    raise ConfigError(
        f"{key!r} is neither code nor name of a check{did_you_mean(key, known)}. docs/assumptions.md lists all."
    )


# Code, name, moment, what is wrong when it fires, page.
CODES: tuple[tuple[str, str, Moment, str, str], ...] = (
    ("PT-C001", "train-half-precision", "config", "weights in 16 bits that the learning rate cannot move", ""),
    ("PT-C004", "train-data-parallel", "config", "several GPUs or processes were meant, and one process runs", ""),
    ("PT-C005", "train-dense-mask", "config", "packed rows with a dense attention mask", ""),
    ("PT-D001", "data-id-out-of-range", "data", "token ids outside the vocabulary", "b"),
    ("PT-D002", "data-bos-double", "data", "rows that begin with two bos tokens", "b"),
    ("PT-D003", "data-eos-double", "data", "rows that end with two eos tokens", "b"),
    ("PT-D004", "data-eos-untrained", "data", "rows that train no token that ends them", "b"),
    ("PT-D005", "data-untrained-row", "data", "rows without a trained token", "b"),
    ("PT-D006", "data-empty-completion", "data", "completions without words", "b"),
    ("PT-D007", "data-duplicate", "data", "rows that repeat an earlier one", "b"),
    ("PT-D008", "data-first-token-whitespace-merge", "data", "prompts that end in a space of their own", "b"),
    ("PT-D009", "data-replacement-char", "data", "damaged text", "b"),
    ("PT-D010", "data-unknown-token", "data", "characters that the tokenizer does not know", "b"),
    ("PT-D011", "data-truncated", "data", "rows cut at the limit", "b"),
    ("PT-D013", "data-pair-identical", "data", "chosen and rejected have the same tokens", "f"),
    ("PT-D014", "data-dropped", "data", "rows that preparation left out", "b"),
    ("PT-D016", "data-control-tokens", "data", "control tokens in the text of a message", "b"),
    ("PT-D015", "data-prompt-diverged", "data", "prompts that tokenise otherwise once the completion follows", "b"),
    ("PT-D022", "pair-length-bias", "data", "one side is nearly always longer", "f"),
    ("PT-D023", "pair-cut-one-side", "data", "the limit cuts one answer of a pair", "f"),
    ("PT-D024", "pair-eos-one-side", "data", "only one side ends with an end-of-turn token", "f"),
    ("PT-D026", "label-contradiction", "data", "one answer labelled good and bad", "f"),
    ("PT-D033", "pair-near-identical", "data", "chosen and rejected hardly differ", "f"),
    ("PT-D034", "pair-against-scores", "data", "pairs that contradict their own scores", "f"),
    ("PT-D035", "pair-swapped", "data", "pairs that appear with both sides swapped", "f"),
    ("PT-D036", "reward-model-agreement", "data", "how often a reward model agrees with the labels", "f"),
    ("PT-B001", "train-nothing-trained", "first_batch", "no parameter requires a gradient", ""),
    ("PT-B002", "train-gradient-not-finite", "first_batch", "a gradient of the first step is not finite", ""),
    ("PT-B003", "train-no-gradient", "first_batch", "no parameter got a gradient", ""),
    ("PT-T001", "train-no-trained-tokens", "log_step", "steps in a row without a trained token", "b"),
    ("PT-T002", "train-padding", "log_step", "batches that are mostly padding", ""),
    ("PT-T003", "train-positions", "log_step", "a sequence longer than the model's positions", ""),
    ("PT-P001", "reference-mismatch", "first_batch", "policy and reference differ before the first update", "f"),
    ("PT-P002", "reference-prefers-rejected", "data", "the reference prefers nearly all rejected answers", "f"),
    ("PT-P003", "rewards-sink-together", "log_step", "chosen and rejected answers both become unlikely", "f"),
    ("PT-P004", "margin-saturated", "log_step", "margins where a sigmoid has no gradient", "f"),
    ("PT-P005", "accuracy-below-half", "log_step", "the policy moves towards rejected answers", "f"),
    ("PT-P006", "rewards-stay-zero", "log_step", "policy and reference stay equal", "f"),
    ("PT-P007", "eval-accuracy-below-half", "log_step", "evaluation prefers the rejected answers", "f"),
    ("PT-R002", "online-groups-flat", "log_step", "nearly all groups have equal rewards", "j"),
    ("PT-R003", "online-length-grows", "log_step", "completions grow while the reward stands", "j"),
    ("PT-R004", "online-kl-grows", "log_step", "the policy runs away from its reference", "c"),
    ("PT-R005", "online-ratio-large", "log_step", "a token far from the policy that sampled it", "c"),
    ("PT-R006", "online-clip-share", "log_step", "many tokens are clipped", "c"),
    ("PT-R007", "online-entropy-collapsed", "log_step", "the policy has become certain of nearly every token", "j"),
    ("PT-R008", "online-completions-cut", "log_step", "completions end at the length limit", "j"),
    ("PT-R009", "online-duplicates", "log_step", "groups of copies", "j"),
    ("PT-R010", "online-correction-masks", "log_step", "the correction for another engine throws tokens away", "c"),
    ("PT-R011", "online-logprobs-missing", "log_step", "the engine gave no log-probs", "c"),
    ("PT-R012", "online-no-gradient", "log_step", "steps that move nothing", "j"),
    ("PT-R014", "online-reward-never-applies", "log_step", "a reward function that never applies", "j"),
    ("PT-R016", "online-reward-nan", "log_step", "a reward function returned NaN", "j"),
    ("PT-R017", "online-reward-slow", "log_step", "the run waits for a reward function", ""),
    ("PT-R019", "online-reward-outlier", "log_step", "one reward far above the others", "j"),
    ("PT-R020", "online-reward-large", "log_step", "rewards whose size makes steps large", "j"),
    ("PT-R021", "online-overlong-unreachable", "config", "a punishment of length that nothing can reach", "j"),
    ("PT-R022", "online-no-signal", "log_step", "many generations in a row without a signal", "j"),
    ("PT-R032", "online-ids-without-token", "log_step", "sampled ids that the tokenizer has no token for", "j"),
    ("PT-R028", "advantages-clipped", "log_step", "advantages far beyond the spread of their group", "j"),
    ("PT-K001", "tokenizers-differ", "config", "token ids of two models mean different things", "i"),
    ("PT-K002", "tokenizers-special", "config", "two models end or pad texts with different tokens", "i"),
    ("PT-K003", "tokenizers-template", "config", "two chat templates render differently", "i"),
    ("PT-K004", "tokens-without-embedding", "first_batch", "ids that a model has no embedding for", "i"),
    ("PT-K005", "tokenizer-larger-than-model", "first_batch", "a tokenizer with more tokens than embeddings", "i"),
    ("PT-K006", "teacher-is-student", "config", "a student that is compared with itself", "i"),
    ("PT-K101", "tokens-pad-stops", "config", "the pad token ends texts", ""),
    ("PT-K102", "tokens-no-pad", "config", "no pad token", ""),
    ("PT-K103", "tokens-stop-unknown", "config", "generation does not stop where training ends texts", ""),
    ("PT-K111", "template-bos-double", "data", "the chat template and the tokenizer both write bos", ""),
    ("PT-K112", "template-bos-missing", "data", "the chat template writes no bos", ""),
    ("PT-K113", "template-eos", "data", "the chat template ends turns without eos", ""),
    ("PT-K114", "template-mask", "data", "the chat template marks no or wrong answer tokens", ""),
    ("PT-K115", "template-prefix", "data", "a conversation is no prefix of its continuation", ""),
    ("PT-K116", "template-reasoning-lost", "data", "the chat template drops reasoning", ""),
    ("PT-K117", "template-start", "data", "the answer mask begins at the wrong token", ""),
    ("PT-K118", "template-stop", "data", "the answer mask leaves out the end of a turn", ""),
    ("PT-K119", "template-tools-lost", "data", "the chat template drops tools or tool calls", ""),
    ("PT-G001", "images-do-not-fit", "data", "images and text longer than the context", "g"),
    ("PT-G002", "image-places", "data", "as many images as there are not places for them", "g"),
    ("PT-G003", "image-unreadable", "data", "images that cannot be read", "g"),
    ("PT-G004", "processor-of-another-model", "config", "a processor of another model", "g"),
    ("PT-G005", "images-do-not-reach", "first_batch", "log-probs that no image moves", "g"),
    ("PT-G006", "tiny-images", "data", "images of less than 32 pixels a side", "g"),
    ("PT-G007", "images-alike", "data", "one image for most rows, or blank ones", "g"),
    ("PT-G008", "placeholder-typed", "data", "text that stands for an image", "g"),
    ("PT-G009", "odd-images", "data", "rotated, transparent, animated or unusual images", "g"),
    ("PT-G010", "remote-images", "data", "images by address", "g"),
    ("PT-G011", "images-lost", "first_batch", "other placeholders than images in a pass", "g"),
    ("PT-G012", "tower-without-gradient", "first_batch", "trained tower without gradient", "g"),
    ("PT-G013", "template-loses-images", "data", "a template that writes other placeholders", "g"),
    ("PT-G014", "images-encoded-again", "data", "JPEG files that a map wrote as PNG", "g"),
    ("PT-G015", "exchanged-images", "log_step", "rollouts under another row's images", "g"),
    ("PT-G016", "engine-reads-otherwise", "config", "an engine that expands images otherwise", "g"),
    ("PT-G017", "images-not-needed", "log_step", "a reward that other images give too", "g"),
    ("PT-L001", "folder-of-another-run", "config", "checkpoints of another run in output_dir", "k"),
    ("PT-L002", "disk-nearly-full", "config", "no room for two checkpoints", "k"),
    ("PT-L003", "gpu-in-use", "config", "less free GPU memory than the optimiser alone needs", "k"),
    ("PT-L004", "port-in-use", "config", "a port that the run needs is taken", "k"),
    ("PT-M001", "weights-exceed-memory", "data", "weights and optimizer alone exceed the memory", "e"),
    ("PT-M002", "estimate-exceeds-memory", "data", "the longest step is likely not to fit", "e"),
    ("PT-M003", "dry-step-out-of-memory", "first_batch", "the longest step did not fit", "e"),
    ("PT-M004", "memory-nearly-full", "log_step", "little memory left for longer samples", "l"),
    ("PT-M005", "memory-unused", "log_step", "much memory unused, and passes that could be larger", "l"),
    ("PT-M006", "memory-fragmented", "log_step", "reserved memory that holds nothing", "l"),
    ("PT-M007", "ranks-uneven", "log_step", "one rank keeps the others waiting", "l"),
    ("PT-M008", "generation-dominates", "log_step", "most of a step is spent on sampling", "l"),
    ("PT-V001", "package-missing", "config", "a package that the config needs is not installed", "m"),
    ("PT-V002", "package-too-old", "config", "a version that is too old, or known not to work", "m"),
    ("PT-V003", "package-untested", "config", "a version newer than the last one tried", "m"),
    ("PT-V005", "package-binaries", "config", "compiled packages made for another torch", "m"),
    ("PT-D030", "bad-rows", "data", "rows that cannot be trained", "b"),
    ("PT-D031", "doubtful-rows", "data", "rows without an answer, blank or equal ones", "b"),
    ("PT-D032", "too-many-bad-rows", "data", "more bad rows than may be dropped", "b"),
    ("PT-R024", "policy-mismatch", "log_step", "the policy moves away from what samples", "c"),
    ("PT-R025", "rollouts-discarded", "log_step", "many rollouts are thrown away as too old", "c"),
    ("PT-R026", "rollouts-at-the-bound", "log_step", "most rollouts are as old as they may be", "c"),
    ("PT-R027", "reward-scales-apart", "log_step", "one reward is larger than all others", "j"),
    ("PT-R029", "reward-column-missing", "data", "a reward function needs a column that is not there", "b"),
    ("PT-R031", "texts-without-partner", "log_step", "most of the text has no partner in the teacher's tokens", "i"),
    ("PT-R030", "references-unread", "data", "reference answers that say nothing", "d"),
    ("PT-S001", "server-other-model", "config", "the server's architecture is not the trainer's", "a"),
    ("PT-S002", "server-small-vocabulary", "config", "the server's vocabulary is smaller", "a"),
    ("PT-S003", "server-other-revision", "config", "the server loaded another revision", "a"),
    ("PT-S004", "server-weights-differ", "first_batch", "log-probs differ after the weights were pushed", "a"),
    ("PT-S005", "server-push-unproved", "first_batch", "the server had the weights before they were pushed", "a"),
    ("PT-S010", "server-short-context", "config", "completions do not fit the server's context", "h"),
    ("PT-S011", "server-raw-logprobs", "config", "the server's log-probs ignore the temperature", "h"),
    ("PT-S012", "server-takes-no-weights", "config", "the server cannot be given weights", "h"),
    ("PT-S013", "server-on-this-device", "config", "server and trainer share an accelerator", "h"),
    ("PT-S014", "server-few-slots", "config", "the server writes few completions at once", "h"),
    ("PT-S015", "server-quantised", "config", "the server runs quantised weights", "h"),
    ("PT-S017", "server-seeds-in-pieces", "config", "seeds would end vLLM on this CPU", "h"),
    ("PT-T005", "train-gradient-spikes", "log_step", "steps with a far larger gradient than usual", ""),
)

# Raised where they are met: placeholders and pictures that do not belong together cannot be trained.
FATAL = ("PT-G002", "PT-G004", "PT-G008", "PT-G011", "PT-G013", "PT-G015", "PT-G016")

for code, name, moment, title, page in CODES:
    register(code, name, moment=moment, title=title, page=page, fatal=code in FATAL)


MODES = ("error", "warn", "off")
REPEATED = 100  # A sign that lasts is told the first time, and then every so many times.
KEPT = 20  # Findings of one code that are written down; more are counted.
LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.WARNING}

Told = Literal["told", "repeated", "silenced", "off"]


def silenced_codes(silence: Mapping[str, str] | None) -> dict[str, str]:
    """Codes that are silenced, with the reason of each.

    Args:
        silence: Reasons by code or name.

    Raises:
        ConfigError: A code or name that does not exist or is fatal, or a reason that says nothing.

    >>> silenced_codes({"data-pair-identical": "a control group"})
    {'PT-D013': 'a control group'}
    """
    codes: dict[str, str] = {}
    for key, reason in (silence or {}).items():
        check = lookup(str(key))
        if check.fatal:
            raise ConfigError(
                f"silence_findings[{key!r}]: {check.code} ({check.title}) cannot be silenced, for what it finds cannot be "
                "trained or sampled. Fix: leave it out, and follow the fix in the error that the run ends with."
            )
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(
                f"silence_findings[{key!r}]={reason!r}: say why {check.code} ({check.title}) is no fault here; the reason is "
                "kept in preflight.json."
            )
        codes[check.code] = reason.strip()
    return codes


def describe(finding: Finding) -> str:
    """A finding as one line: code, what, where, why, what to do, and the name by which it is silenced."""
    name = f" [{REGISTRY[finding.code].name}]" if finding.code in REGISTRY else ""
    return f"{finding.code}: {finding.what} ({finding.where}): {finding.why} Do: {finding.fix}{name}"


@dataclass
class Result:
    """What one check did in this run.

    Attributes:
        runs: How often it looked.
        seconds: What that took, shared among the checks of one function.
        findings: With how often each was seen.
        failed: Error of a check that could not run.
    """

    runs: int = 0
    seconds: float = 0.0
    findings: dict[tuple[str, str], tuple[Finding, int]] = field(default_factory=dict)
    failed: str = ""

    @property
    def outcome(self) -> str:
        """``nothing found``, ``found``, ``could not look``, or ``not looked for``."""
        if self.findings:
            return "found"
        if self.failed:
            return "could not look"
        return "nothing found" if self.runs else "not looked for"


class Preflight:
    """The checks of one run, at its four moments.

    Args:
        mode: ``error`` ends a run on an error, ``warn`` tells it and goes on, ``off`` does not look.
        silence: Reasons by code or name of findings that are not told.

    >>> preflight = Preflight()
    >>> preflight.add(Finding("PT-T002", "warning", "w", "here", "y", "f"))
    'told'
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
        self.told: list[Finding] = []
        self.notes: dict[str, Any] = {}  # What else is known of the run, for the file.
        self.changed = True  # Since it was last written.

    @property
    def active(self) -> bool:
        """Whether anything is looked for."""
        return self.mode != "off"

    @contextmanager
    def record_check(self, moment: Moment, codes: Collection[str]) -> Iterator[None]:
        """Count what happens inside as one look for these codes."""
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

    def run(self, moment: Moment, context: Context) -> list[Finding]:
        """What all probes of a moment see; one that fails is noted and told, and stops nothing."""
        findings: list[Finding] = []
        for probe in list(PROBES.values()) if self.active else ():
            if probe.moment != moment or (probe.part is not None and context.parts.get(probe.part) is None):
                continue
            try:
                with self.record_check(moment, probe.codes):
                    findings += [finding for finding in probe.function(context) if finding is not None]
            except PreflightError:
                raise
            except Exception as error:  # A check must never be what breaks a run.
                said = hide_secrets(f"{type(error).__name__}: {error}")
                for code in probe.codes:
                    self.results[code].failed = said
                logger.warning("the checks %s could not be made: %s", ", ".join(probe.codes), said)
        return findings

    def add(self, finding: Finding) -> Told:
        """Write a finding down, and say whether it is to be told."""
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
        self.told.append(finding)
        return "told"

    def refuses(self, finding: Finding) -> bool:
        """Whether a finding ends the run."""
        return finding.severity == "error" and self.mode == "error" and finding.code not in self.silenced

    def report(self, findings: Iterable[Finding | None], *, log: bool = True) -> list[Finding]:
        """Log findings, each kind the first time and every hundredth; errors among them end the run together.

        Args:
            findings: None stands for nothing found.
            log: False where another process says the same.

        Returns:
            Those that were told.

        Raises:
            PreflightError: With all errors, where ``mode`` is ``error``.
        """
        told, refused = [], []
        for finding in findings:
            if finding is None:
                continue
            said = self.add(finding)
            if self.active and self.refuses(finding):
                refused.append(finding)
                told.append(finding)
            elif said == "told":
                told.append(finding)
                if log:
                    logger.log(LEVELS[finding.severity], "%s", describe(finding))
        if refused:
            raise refusal(refused)
        return told

    def to_dict(self) -> dict[str, Any]:
        """For ``preflight.json``."""
        checks = load()
        rows = []
        for code in sorted({*self.results, *self.silenced}):
            check, result = checks.get(code), self.results.get(code, Result())  # A user's own code is not registered.
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
    """The error of a run that is refused, with all reasons."""
    listed = describe(findings[0]) if len(findings) == 1 else "".join(f"\n- {describe(f)}" for f in findings)
    first = findings[0].code
    error = PreflightError(
        f"{listed}\nTo go on nevertheless: preflight='warn', or silence_findings={{{first!r}: 'why it is no fault'}}."
    )
    error.findings = list(findings)
    return error
