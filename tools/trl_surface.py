"""Compare the public surface with TRL's: import paths, config fields and defaults, constructors, methods.

    python tools/trl_surface.py --trl PATH/TO/PYTHON --json tests/snapshots/trl_surface.json --page docs/migration.md

``--trl`` is the Python of an environment with ``trl==1.16.0``. It only reads names, defaults and signatures there;
posttrain never imports TRL. Without ``--trl`` the names of the snapshot are compared. ``--page`` writes the tables between
the two marks of the page on migration.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SNAPSHOT = ROOT / "tests" / "snapshots" / "trl_surface.json"
STABLE = ["SFT", "DPO", "GRPO", "RLOO", "Reward", "KTO", "Distillation"]
EXPERIMENTAL = {
    "a2po": "A2PO",
    "async_distillation": "AsyncDistillation",
    "async_grpo": "AsyncGRPO",
    "cpo": "CPO",
    "gmpo": "GMPO",
    "gkd": "GKD",
    "gold": "GOLD",
    "iw_opd": "IWOPD",
    "online_dpo": "OnlineDPO",
    "orpo": "ORPO",
    "sdft": "SDFT",
    "sdpo": "SDPO",
    "server_distillation": "ServerDistillation",
    "tpo": "TPO",
}


def value_of(default: Any) -> Any:
    """A default as JSON: enums by their value, sets sorted."""
    default = getattr(default, "value", default)
    if isinstance(default, set | frozenset):
        return sorted(map(str, default))
    return default if isinstance(default, str | int | float | bool | list | dict | None) else repr(default)


def names_of(package: str) -> dict[str, list[str]]:
    """Public classes and functions by the module that defines them."""
    found: dict[str, list[str]] = {}
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if any(part.startswith("_") for part in info.name.split(".")) or ".cli" in info.name:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # A module of an extra that is not installed there.
            continue
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and (inspect.isclass(value) or inspect.isfunction(value))
            and value.__module__.startswith(f"{package}.")
        ]
        found[info.name.removeprefix(f"{package}.")] = sorted(names)
    return found


def fields_of(config: type) -> dict[str, Any]:
    """Fields of a config with the values that an instance without arguments has."""
    # TRL's has no default for it.
    needed = {"teacher_model_server_url": "http://teacher"} if config.__name__ == "ServerDistillationConfig" else {}
    with tempfile.TemporaryDirectory() as folder:
        instance = config(output_dir=folder, use_cpu=True, **needed)
    return {field.name: value_of(getattr(instance, field.name)) for field in dataclasses.fields(config)}


def surface(package: str) -> dict[str, Any]:
    """What this environment's TRL offers."""
    trl = importlib.import_module(package)
    pairs = dict.fromkeys(STABLE, trl)
    for path, name in EXPERIMENTAL.items():
        try:
            pairs[name] = importlib.import_module(f"{package}.experimental.{path}")
        except ImportError:
            continue
    out: dict[str, Any] = {"version": trl.__version__, "modules": names_of(package), "configs": {}, "trainers": {}}
    import transformers

    base = set(dir(transformers.Trainer))
    inherited = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    for name, module in pairs.items():
        config, trainer = getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")
        known = fields_of(config)
        out["configs"][name] = {k: v for k, v in known.items() if k not in inherited or k in config.__annotations__}
        own = [c for c in trainer.__mro__ if c.__module__.startswith(package)]
        out["trainers"][name] = {
            "positional": list(inspect.signature(trainer.__init__).parameters)[1:],
            "methods": sorted({m for c in own for m, v in vars(c).items() if inspect.isfunction(v)} - {"__init__"}),
            "overrides": sorted({m for c in own for m, v in vars(c).items() if inspect.isfunction(v)} & base),
        }
    return out


def import_paths(modules: dict[str, list[str]]) -> dict[str, list[str]]:
    """Every public name of TRL by its module's path here: resolved, refused with a name to use, refused, or lost."""
    result: dict[str, list[str]] = {"resolved": [], "named": [], "refused": [], "lost": []}
    for path, names in modules.items():
        for name in names:
            try:
                getattr(importlib.import_module(f"posttrain.{path}"), name)
                result["resolved"].append(f"{path}.{name}")
            except ModuleNotFoundError:
                result["lost"].append(f"{path}.{name}")
            except (ImportError, AttributeError) as error:
                kind = "named" if "Fix: use" in str(error) else "refused"
                result[kind].append(f"{path}.{name}")
    return result


def config_differences(configs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fields of TRL's configs that ours lack or that have another default: ``(theirs, ours)``."""
    import posttrain

    found: dict[str, dict[str, Any]] = {}
    for name, fields in configs.items():
        config = getattr(posttrain, f"{name}Config", None)
        if config is None:
            found[name] = {"": "no such config"}
            continue
        ours = fields_of(config)
        found[name] = {
            field: "missing" if field not in ours else (value, ours[field])
            for field, value in fields.items()
            if field not in ours or not (ours[field] == value or spelled_alike(value, ours[field]))
        }
    return found


def constructors(trainers: dict[str, dict[str, Any]]) -> dict[str, tuple[list[str], list[str]]]:
    """Trainers whose positional parameters are not TRL's, in its order."""
    import posttrain

    found = {}
    for name, shape in trainers.items():
        trainer = getattr(posttrain, f"{name}Trainer", None)
        if trainer is None:
            continue
        ours = [
            parameter.name
            for parameter in inspect.signature(trainer.__init__).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ][1:]
        theirs = [parameter for parameter in shape["positional"] if parameter != "kwargs"]
        if ours[: len(theirs)] != theirs:
            found[name] = (theirs, ours)
    return found


def spelled_alike(theirs: Any, ours: Any) -> bool:
    """None here means what 0, False or an empty value means there."""
    return not theirs and not ours


def tables(trl: dict[str, Any]) -> str:
    """The comparison as Markdown."""
    from posttrain.cli.check import DIFFERENT

    paths = import_paths(trl["modules"])
    total = sum(map(len, paths.values()))

    lines = [
        f"Compared with TRL {trl['version']}: of {total} public names by their modules, {len(paths['resolved'])} resolve, "
        f"{total - len(paths['resolved']) - len(paths['lost'])} are refused by name, {len(paths['lost'])} are lost.",
        "",
        f"| config field | default in TRL {trl['version']} | ours | why, and what restores TRL's |",
        "|---|---|---|---|",
    ]
    for name, fields in config_differences(trl["configs"]).items():
        for field, what in fields.items():
            if isinstance(what, str):
                continue
            _, why, switch = DIFFERENT.get((name, field), (None, "", f"{field}={what[0]!r}"))
            why = f"{why}: " if why else ""
            lines.append(f"| `{name}Config.{field}` | `{what[0]!r}` | `{what[1]!r}` | {why}`{switch}` |")
    return "\n".join(lines)


def write_page(page: Path, trl: dict[str, Any]) -> None:
    """Replace what stands between the marks of the page."""
    begin, end = "<!-- tables -->", "<!-- end of tables -->"
    text = page.read_text(encoding="utf-8")
    head, tail = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{head}{begin}\n{tables(trl)}\n{end}{tail}", encoding="utf-8")


def report(trl: dict[str, Any]) -> None:
    """Print the comparison."""
    from posttrain.cli.check import DIFFERENT

    paths = import_paths(trl["modules"])
    print(f"TRL {trl['version']}: public names by module path")
    for kind, names in paths.items():
        print(f"  {kind:9} {len(names)}")
    for name in paths["lost"]:
        print(f"    lost: {name}")
    print("config fields that are missing or have another default (TRL's, ours)")
    for name, fields in config_differences(trl["configs"]).items():
        for field, what in fields.items():
            why = f" ({DIFFERENT[name, field][1]})" if (name, field) in DIFFERENT else ""
            print(f"  {name}Config.{field}: {what}{why}")
    print("constructors with another positional order")
    for name, (theirs, ours) in constructors(trl["trainers"]).items():
        print(f"  {name}Trainer: {', '.join(theirs)} | {', '.join(ours)}")


def main() -> None:
    """Read TRL's surface in its own environment, or from the snapshot, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trl", help="Python of an environment with TRL; None reads the snapshot")
    parser.add_argument("--json", type=Path, help="also write TRL's surface to this file")
    parser.add_argument("--page", type=Path, help="also write the tables of this page")
    parser.add_argument("--dump", action="store_true", help="only print this environment's TRL surface as JSON")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.dump:
        print(json.dumps(surface("trl"), sort_keys=True, default=repr))
        return
    if args.trl:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        done = subprocess.run(
            [args.trl, __file__, "--dump"], env=environment, check=True, capture_output=True, text=True
        )
        trl = json.loads(done.stdout.strip().splitlines()[-1])
    else:
        trl = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    if args.json:
        args.json.write_text(json.dumps(trl, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if args.page:
        write_page(args.page, trl)
    report(trl)


if __name__ == "__main__":
    sys.exit(main())
