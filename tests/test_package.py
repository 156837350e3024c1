"""The package as a whole: public names, lazy imports, and no mention of anything but itself."""

import ast
import contextlib
import dataclasses
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import posttrain
from tests.wordings import raises

ROOT = Path(__file__).parents[1]
# Modules that are part of an extra: they import its packages at their top.
OF_ANOTHER_NAME = {"openenv": "openenv-core"}  # Distributions that need not be installed here.
OF_EXTRAS = (
    "posttrain.extensions.serve", "posttrain.extensions.migrate.scripts", "posttrain.extensions.vllm.worker",
    "posttrain.extensions.agents.proxy",
    *(f"posttrain.extensions.server.{name}" for name in ("bodies", "guard", "listening")),
)  # fmt: skip


def python(code, timeout=120):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT
    )


def test_all_is_sorted_and_every_name_is_there():
    assert posttrain.__all__ == sorted(posttrain.__all__)
    assert len(set(posttrain.__all__)) == len(posttrain.__all__)
    for name in posttrain.__all__:
        assert getattr(posttrain, name) is not None
    with raises(AttributeError, "'GPROTrainer'"):
        posttrain.GPROTrainer  # noqa: B018


def test_importing_the_package_is_fast_and_loads_no_torch():
    code = "import time; t=time.perf_counter(); import posttrain; d=time.perf_counter()-t; import sys; print(d, 'torch' in sys.modules)"
    best = min(float(python(code).stdout.split()[0]) for _ in range(3))
    assert python(code).stdout.split()[1] == "False"
    assert best < 0.3


def test_importing_the_package_asks_for_sleeping_threads_and_large_pages_unless_the_user_says_otherwise(monkeypatch):
    names = ("OMP_WAIT_POLICY", "THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT")
    code = f"import posttrain, os; print(*(os.environ.get(name) for name in {names}))"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert python(code).stdout.split() == ["PASSIVE", "1", "3000"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert python(code).stdout.split() == ["PASSIVE", "1", "7"]
    monkeypatch.delenv("GOMP_SPINCOUNT")
    for name, own in zip(names, ("ACTIVE", "0"), strict=False):
        monkeypatch.setenv(name, own)
    assert python(code).stdout.split() == ["ACTIVE", "0", "None"]


def declared():
    """Distributions that pyproject names: those of the core, and those of all extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    extras = {
        canonicalize_name(Requirement(t).name) for texts in project["optional-dependencies"].values() for t in texts
    }
    return core, extras


def brought_by(names):
    """These distributions and all that they require."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            required = [Requirement(text) for text in metadata.requires(name) or []]
            waiting += [
                canonicalize_name(r.name) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})
            ]
    return found


def distributions():
    """The distributions that bring each importable name."""
    return {name: {canonicalize_name(d) for d in of} for name, of in metadata.packages_distributions().items()}


def test_core_dependencies_alone_import_every_public_name_and_every_module():
    core = brought_by(declared()[0]) | {"posttrain", "setuptools"}
    blocked = sorted(name for name, of in distributions().items() if not of & core)
    assert "pytest" in blocked
    modules = [m.name for m in pkgutil.walk_packages(posttrain.__path__, "posttrain.")]
    modules = [name for name in modules if not name.startswith(OF_EXTRAS) and not name.endswith("__main__")]
    code = (
        f"import sys, importlib; [sys.modules.__setitem__(n, None) for n in {blocked!r}]; import posttrain; "
        f"[getattr(posttrain, n) for n in posttrain.__all__]; [importlib.import_module(n) for n in {modules!r}]; "
        "print('fine')"
    )
    done = python(code)
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_every_extra_that_a_page_or_an_error_names_is_one_and_the_page_about_installing_has_them_all():
    from posttrain.integrations import EXTRAS
    from tests.test_docs import names

    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {"posttrain.integrations": set(EXTRAS.values())}
    for path in tracked():
        if path.suffix in (".md", ".ipynb", ".py", ".toml") and "changes" not in path.parts:
            found = re.findall(r"posttrain\[([a-z][a-z,-]*)\]", path.read_text(encoding="utf-8"))
            named[path.name] = {name for text in found for name in text.split(",")}
    assert {where: unknown for where, found in named.items() if (unknown := found - known)} == {}
    assert set(names("install.md", "extra")) == known


def test_the_installed_entry_points_are_those_of_pyproject():
    """After a change of entry points, install again: ``pip install -e . --no-deps``."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, points in written.items():
        installed = {entry.name: entry.value for entry in metadata.entry_points(group=group)}
        assert points.items() <= installed.items(), group


def imports():
    """``(top-level package, file)`` of every import of the package that is neither its own nor the standard library's."""
    for path in (ROOT / "posttrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"posttrain"}:
                yield top, str(path.relative_to(ROOT))


def test_every_package_that_is_imported_is_declared():
    core, extras = declared()
    known = distributions()
    brought = {"starlette", "pydantic-core", "h11"}  # By fastapi, pydantic and uvicorn.
    missing = {
        (top, path) for top, path in imports()
        if not known.get(top, {canonicalize_name(OF_ANOTHER_NAME.get(top, top))}) & (core | extras | brought)
    }  # fmt: skip
    assert not missing


def test_every_public_class_and_function_says_what_it_is():
    public = {name: getattr(posttrain, name) for name in posttrain.__all__}
    missing = [
        name
        for name, value in public.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not (value.__doc__ or "").strip()
    ]
    assert not missing


def tracked():
    out = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False).stdout.split()
    return [ROOT / name for name in out if (ROOT / name).is_file()]


def test_the_project_speaks_of_itself_only():
    words = re.compile(
        r"/work/main|/work/shared|/opt/dev|/opt/peer|/tmp/setup|\.library\b|helper session|files\.pythonhosted"
    )
    imports = re.compile(r"^\s*(import trl\b|from trl\b)", re.M)
    for path in tracked():
        if path.suffix in (".png", ".parquet") or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        assert not words.search(text), f"{path}: {words.search(text)}"
        # Scripts that are rewritten before they run.
        written = "old_scripts" in path.parts or path.name in ("test_migrate.py", "test_old_scripts.py")
        if path.parts[len(ROOT.parts)] in ("posttrain", "tests") and not written:
            assert not imports.search(text), path


def test_every_choice_of_the_config_is_a_row_of_its_table():
    import typing

    from posttrain.losses.policy import LOSS_TYPES
    from posttrain.methods.grpo.config import GRPOConfig
    from posttrain.methods.sft import LOSSES, SFTConfig

    hints = typing.get_type_hints(GRPOConfig)
    assert typing.get_args(hints["loss_type"]) == tuple(LOSS_TYPES)
    assert set(typing.get_args(typing.get_args(typing.get_type_hints(SFTConfig)["loss_type"])[0])) == set(LOSSES)


def test_help_documents_every_field_of_a_config():
    for name in ("GRPOConfig", "SFTConfig", "DPOConfig", "PPOConfig", "RewardConfig", "GKDConfig"):
        kind = getattr(posttrain, name)
        missing = [item.name for item in dataclasses.fields(kind) if f"\n    {item.name}: " not in kind.__doc__]
        assert not missing and kind.__doc__.count("\nArgs:") == 1


def test_no_file_has_the_marks_of_a_merge():
    marks = re.compile(r"^\s*(<<<<<<<|>>>>>>>) \S", re.M)
    texts = [path for path in tracked() if path.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".txt")]
    assert texts and not [path for path in texts if marks.search(path.read_text(encoding="utf-8"))]
