"""The documentation knows every public name and every choice; its examples parse, and those marked to run do."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import posttrain
from posttrain.losses.policy import LOSS_TYPES
from tools.api_page import METHODS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(
    str(path.relative_to(DOCS))
    for path in [*DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("notebooks/*.md")]
)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FENCE = re.compile(r"(?P<run><!-- run -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.S | re.M)


def blocks(page, language):
    """``(code, marked to run)`` of a page's code blocks in one language."""
    found = FENCE.finditer((DOCS / page).read_text(encoding="utf-8"))
    return [(m["code"], bool(m["run"])) for m in found if m["language"] == language]


def with_blocks(language, *, marked=False):
    return [page for page in PAGES if any(run or not marked for _, run in blocks(page, language))]


def tables(page):
    """Every table of a page: its header, and its rows as lists of cells."""
    found, lines = [], FENCE.sub("", (DOCS / page).read_text(encoding="utf-8")).splitlines()
    for before, rule in itertools.pairwise(lines):
        if re.fullmatch(r"\|(-+\|)+", rule):
            found.append((cells(before), []))
        elif rule.startswith("|") and before.startswith("|"):
            found[-1][1].append(cells(rule))
    return found


def cells(line):
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def table(page, first):
    """The rows of the table whose first column has this header."""
    (rows,) = [rows for header, rows in tables(page) if header[0] == first]
    return rows


def ticked(cell):
    return re.findall(r"`([^`]+)`", cell)


def names(page, first):
    """The names in backticks that stand in the first column of a table, in order."""
    return [name for row in table(page, first) for name in ticked(row[0])]


def options(page, first):
    """Names and written defaults of a table of options."""
    return {name: row[1].strip("`") for row in table(page, first) for name in ticked(row[0])}


def own_fields(config):
    """Fields that a config adds to its parents', or gives another default."""
    inherited = {}
    for parent in config.__mro__[1:]:
        if dataclasses.is_dataclass(parent):
            inherited |= {f.name: f.default for f in dataclasses.fields(parent) if f.name not in inherited}
    return [f for f in dataclasses.fields(config) if f.name not in inherited or inherited[f.name] != f.default]


def default_of(field):
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def defaults_of(function):
    parameters = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    kept = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD and p.name != "self"]
    return {p.name: "required" if p.default is empty else repr(p.default) for p in kept}


# What was there before: names and the changelog --------------------------------------------------------------------------


def test_every_public_name_has_its_place_in_the_api_page():
    from tools.api_page import FOLDER, pages

    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")} == pages()
    text = "".join(pages().values())
    assert all(f"::: posttrain.{module}.{n}\n" in text for n, module in posttrain._PUBLIC.items())
    configs = [n for n in posttrain._PUBLIC if n.endswith("Config")]
    assert text.count("inherited_members: true") == len(configs), "a page would lack the fields of base classes"


@pytest.mark.parametrize("name", [f"{stem}Trainer" for _, stem in METHODS.values()])
def test_every_parameter_of_a_trainer_is_documented_alone_and_in_order(name):
    trainer = getattr(posttrain, name)
    section = inspect.getdoc(trainer).partition("\nArgs:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w[^:]*): ", section, re.MULTILINE)
    assert documented == list(inspect.signature(trainer.__init__).parameters)[1:]


@pytest.mark.slow
def test_every_field_of_every_config_is_on_its_api_page():
    griffe = pytest.importorskip("griffe")
    from tools.griffe_options import own_fields

    extensions = griffe.load_extensions(str(DOCS.parent / "tools" / "griffe_options.py"))
    package = griffe.load("posttrain", extensions=extensions, search_paths=[DOCS.parent])
    for name, module in posttrain._PUBLIC.items():
        kind = getattr(posttrain, name) if name.endswith("Config") else None
        if dataclasses.is_dataclass(kind):
            shown = package[f"{module}.{name}"].all_members
            fields = own_fields(kind)
            assert fields and [f.name for f in fields if shown[f.name].docstring.value != f.metadata["help"]] == [], (
                name
            )


def test_doctests_of_the_reference_are_blocks_of_code():
    pytest.importorskip("griffe")
    from tools.griffe_options import fenced

    text = "Say it.\n\n>>> a = 1  # doctest: +SKIP\n>>> a\n1\n\nMore."
    assert fenced(text) == "Say it.\n\n```pycon\n>>> a = 1\n>>> a\n1\n```\n\nMore."


def test_the_table_of_losses_is_the_table_of_the_code():
    text = (DOCS / "losses.md").read_text()
    assert all(f"| `{name}`" in text for name in LOSS_TYPES)


def test_the_changelog_has_an_unreleased_section():
    assert "## [Unreleased]" in (DOCS.parent / "CHANGELOG.md").read_text()


# Pages -------------------------------------------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    nav = (DOCS.parent / "mkdocs.yml").read_text().partition("nav:")[2]
    assert [page for page in PAGES if f": {page}\n" not in nav] == []


def test_the_index_of_papers_is_that_of_the_recipes():
    files = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.parent.glob("examples/configs/papers/*.yaml")}
    assert names("papers.md", "recipe") == sorted(files)
    for (name, text), row in zip(sorted(files.items()), table("papers.md", "recipe"), strict=True):
        assert set(re.findall(r"arXiv:([\d.]+\d)", text)) == set(re.findall(r"abs/([\d.]+\d)", row[1])), name
        lines = [line for line in text.splitlines() if re.match(r"\w+:", line)]
        assert ticked(row[2]) == [line.split(" #")[0].strip() for line in lines], name


def test_every_address_of_the_project_is_one_of_the_two_of_the_package():
    import tomllib

    root = DOCS.parent
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    home, site = urls["Homepage"], urls["Documentation"]
    owner = home.split("/")[-2]
    pattern = re.compile(rf"https://(?:github\.com/{owner}|{owner}\.github\.io)/[\w-]*")
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    texts = {name: (root / name).read_text(encoding="utf-8", errors="ignore") for name in tracked}
    found = {name: set(pattern.findall(text)) for name, text in texts.items() if pattern.search(text)}
    assert {"mkdocs.yml", "CITATION.cff", "docs/install.md", "README.md", "tools/notebooks.py"} <= set(found)
    assert {name: others for name, links in found.items() if (others := links - {home, site})} == {}
    assert all(url.startswith((home, site)) for url in urls.values())


def test_one_version_stands_everywhere_and_the_changelog_has_it():
    import tomllib

    version = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert version == posttrain.__version__
    assert f"## [{version}] - " in (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {version}\n" in (DOCS.parent / "CITATION.cff").read_text(encoding="utf-8")


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", (DOCS / page).read_text(encoding="utf-8")):
            assert ((DOCS / page).parent / target).is_file(), (page, target)


@pytest.mark.parametrize("page", with_blocks("python"))
def test_python_blocks_parse_and_name_what_exists(page):
    for code, _ in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "posttrain":
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert name.name in posttrain.__all__ or node.module != "posttrain", name.name
                    assert hasattr(module, name.name), name.name


ENTRY_POINTS = {"posttrain.commands", "posttrain.engines", "posttrain.GROUP", "posttrain.PATH"}


def dotted(text):
    """Names of the package in a text. ``.posttrain.lock`` is a file."""
    return set(re.findall(r"(?<![\w./-])posttrain(?:\.[A-Za-z_]\w*)+", text)) - ENTRY_POINTS


def leads_nowhere(name):
    """Return whether a name is not one of the package, or stands for something only in `MOVED`."""
    from posttrain.compat.paths import MOVED

    worker = "posttrain.extensions.vllm.worker"  # It can be imported only where vLLM is.
    if name.startswith(worker):
        written = (DOCS.parent / f"{worker.replace('.', '/')}.py").read_text(encoding="utf-8")
        return name != worker and f"class {name.removeprefix(f'{worker}.')}:" not in written
    if any(f"{name}.".startswith(f"{old}.") for old in MOVED):
        return True
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return True
    return False


def test_every_dotted_name_of_the_package_in_the_documentation_exists():
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    named = {str(path.relative_to(DOCS.parent)): dotted(path.read_text(encoding="utf-8")) for path in pages}
    assert sum(map(len, named.values())) > 200
    assert {page: wrong for page, found in named.items() if (wrong := sorted(filter(leads_nowhere, found)))} == {}


def test_every_dotted_name_of_the_package_in_a_string_of_the_code_exists():
    from posttrain.extensions.vllm.engine import OLD_EXTENSION

    wrong, count = {}, 0
    for path in (DOCS.parent / "posttrain").rglob("*.py"):
        if path.name == "paths.py" and path.parent.name == "compat":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found = {name for text in texts for name in dotted(text)} - {OLD_EXTENSION}
        count += len(found)
        wrong |= {path.name: names} if (names := sorted(filter(leads_nowhere, found))) else {}
    assert count > 50 and wrong == {}


@pytest.mark.parametrize("page", with_blocks("pycon"))
def test_console_examples_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(code for code, _ in blocks(page, "pycon"))
    example = doctest.DocTestParser().get_doctest(code, {}, page, page, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said = []
    runner.run(example, out=said.append)
    assert runner.summarize(verbose=False).attempted > 0
    assert not said, "".join(said)


@pytest.mark.parametrize("page", with_blocks("python", marked=True))
def test_marked_examples_run(page, tmp_path, monkeypatch, tiny_model_dir):
    """Blocks of one page share their names, as a reader would run them; the tiny model stands for the real one."""
    monkeypatch.chdir(tmp_path)
    script = types.ModuleType("script")  # Classes are pickled by the module that defines them.
    monkeypatch.setitem(sys.modules, "script", script)
    for code, marked in blocks(page, "python"):
        if marked:
            exec(compile(code.replace(MODEL, tiny_model_dir), page, "exec"), vars(script))


@pytest.mark.parametrize("page", with_blocks("json"))
def test_json_blocks_are_lines_of_json(page):
    for code, _ in blocks(page, "json"):
        assert all(isinstance(json.loads(line), dict) for line in code.splitlines())


# Choices and options: the page's table is the code's -----------------------------------------------------------------------


def test_the_table_of_dataset_types_is_the_one_of_the_code():
    from posttrain.data.formats import ROLES, TYPES

    assert names("dataset_formats.md", "type") == list(dict.fromkeys(kind for kind, _ in TYPES))
    columns = {ticked(row[0])[0]: ticked(row[1]) for row in table("dataset_formats.md", "type")}
    assert all(set(needed) <= set(columns[kind]) for kind, needed in TYPES)
    rows = table("dataset_formats.md", "`from`")
    assert {speaker: ticked(row[1])[0] for row in rows for speaker in ticked(row[0])} == ROLES


def test_the_tables_of_mixtures_are_the_fields_of_the_code():
    from posttrain import DatasetConfig, DatasetMixtureConfig

    for first, kind in (("field of a member", DatasetConfig), ("field of the mixture", DatasetMixtureConfig)):
        assert options("dataset_formats.md", first) == {f.name: default_of(f) for f in dataclasses.fields(kind)}


def test_the_table_of_packing_strategies_is_the_one_of_the_code():
    from posttrain.data.packing import STRATEGIES, pack_dataset

    assert names("packing.md", "`packing_strategy`") == list(STRATEGIES)
    assert options("packing.md", "argument of `pack_dataset`") == defaults_of(pack_dataset)


def test_the_tables_of_sft_are_those_of_the_code():
    from posttrain import PostTrainingConfig, SFTConfig
    from posttrain.methods.sft import LOSSES

    assert names("sft.md", "`loss_type`") == list(LOSSES)
    assert options("sft.md", "option") == {f.name: default_of(f) for f in own_fields(SFTConfig)}
    shared = {f.name: default_of(f) for f in own_fields(PostTrainingConfig)}
    assert options("sft.md", "option of every trainer") == shared


def test_the_tables_of_reward_models_are_the_fields_of_the_code():
    from posttrain import RewardConfig

    for page, config in (("reward.md", RewardConfig),):
        assert options(page, "option") == {f.name: default_of(f) for f in own_fields(config)}


def test_the_tables_of_preference_methods_are_the_fields_of_the_code():
    from posttrain import BCOConfig, CPOConfig, DPOConfig, KTOConfig, ORPOConfig, TPOConfig
    from posttrain.methods.preference import AnswerConfig, ComparedConfig

    for page, first, config in (
        ("dpo.md", "option", DPOConfig),
        ("dpo.md", "option of every preference method", AnswerConfig),
        ("dpo.md", "option of methods with a reference", ComparedConfig),
        ("kto_bco.md", "option of `KTOConfig`", KTOConfig),
        ("kto_bco.md", "option of `BCOConfig`", BCOConfig),
        ("reference_free.md", "option of `CPOConfig`", CPOConfig),
        ("reference_free.md", "option of `TPOConfig`", TPOConfig),
    ):
        assert options(page, first) == {f.name: default_of(f) for f in own_fields(config)}, first
    assert own_fields(ORPOConfig) == []


def formula_values():
    """Symbols of the page's formulas, and the same numbers by the names that the losses read."""
    import torch
    from torch.nn import functional as F

    from posttrain.losses.divergence import pair_values

    torch.manual_seed(0)
    pc, pr, qc, qr = (-10 * torch.rand(6, dtype=torch.float64) for _ in range(4))
    nc, nr = torch.randint(1, 9, (2, 6))
    symbols = {"beta": 0.3, "eps": 0.1, "tau": 0.5, "gamma": 0.7, "wd": 1.2, "wu": 0.8, "z0": 0.4, "delta": -0.2}
    symbols |= {"sig": torch.sigmoid, "lsig": F.logsigmoid, "relu": torch.relu, "exp": torch.exp, "alpha": 0.5}
    symbols |= {"log": lambda x: torch.tensor(x).log(), "sort": lambda x: x.sort().values}
    symbols |= {"mean": lambda x: x.double().mean()}
    smooth = cells(next(x for x in (DOCS / "losses.md").read_text().splitlines() if x.startswith("| `smooth(x)`")))[1]
    symbols["smooth"] = lambda x: eval(ticked(smooth)[0], symbols | {"x": x})
    symbols |= {"pc": pc, "pr": pr, "qc": qc, "qr": qr, "Lc": pc - qc, "Lr": pr - qr, "Nc": nc, "Nr": nr, "L": pc - qc}
    symbols |= {"c": pc - qc, "r": pr - qr, "d": pc - qc - pr + qr, "u": pc - pr}
    symbols["g"] = torch.sigmoid(symbols["beta"] * symbols["d"] / symbols["tau"])
    values = pair_values(pc, pr, qc, qr, nc, nr) | {"log_ratio": pc - qc, "baseline": torch.tensor(symbols["z0"])}
    scalars = {"beta": 0.3, "label_smoothing": 0.1, "discopop_tau": 0.5, "gamma": 0.7}
    scalars |= {"desirable_weight": 1.2, "undesirable_weight": 0.8}
    return symbols, values | {"shift": symbols["delta"], "weight": torch.ones(6)}, scalars


@pytest.mark.parametrize("method", ["DPO", "CPO", "TPO"])
def test_the_tables_of_pair_losses_say_what_the_code_computes_and_reads(method):
    """Names, formulas (evaluated), options that are read, and the papers of the docstrings."""
    import torch

    from posttrain.losses import preference

    formulas = getattr(preference, f"{method}_LOSSES")
    symbols, values, scalars = formula_values()
    if method != "DPO":  # Scores are log-probs of the policy alone.
        values |= {"chosen_score": symbols["pc"], "rejected_score": symbols["pr"]}
    names_of = {"gamma": {"CPO": "simpo_gamma", "TPO": "tpo_l_gamma"}.get(method)}
    first = f"`loss_type` of {method}"
    assert names("losses.md", first) == list(formulas)
    for (name, formula), row in zip(formulas.items(), table("losses.md", first), strict=True):
        expected = eval(ticked(row[1])[0], symbols)
        assert torch.allclose(formula(values, **scalars), expected, rtol=1e-6), name
        assert (row[2] == "means") == formula.per_token, name
        reads = [names_of.get(scalar, scalar) for scalar in formula.scalars]
        linked = ["f_divergence_type"] if method == "DPO" and formula.uses_link else []
        assert ticked(row[3]) == reads + linked, name
        papers = re.findall(r"arXiv:[\d.]*\d", formula.function.__doc__ or "")
        assert set(papers) <= set(re.findall(r"arXiv:[\d.]*\d", row[5])), name


@pytest.mark.parametrize("good", [True, False])
def test_the_tables_of_judged_losses_and_divergences_say_what_the_code_computes(good):
    import torch

    from posttrain.losses.divergence import DIVERGENCES, link
    from posttrain.losses.unpaired import BCO_LOSSES, KTO_LOSSES

    symbols, values, scalars = formula_values()
    values["desirable"] = torch.full((6,), good)
    for first, formulas in (("`loss_type` of KTO", KTO_LOSSES), ("loss of BCO", BCO_LOSSES)):
        assert names("losses.md", first) == list(formulas)
        for (name, formula), row in zip(formulas.items(), table("losses.md", first), strict=True):
            expected = eval(ticked(row[1 if good else 2])[0], symbols)
            assert torch.allclose(formula(values, **scalars), expected, rtol=1e-6), name
            papers = re.findall(r"arXiv:[\d.]*\d", formula.function.__doc__ or "")
            assert papers and set(papers) <= set(re.findall(r"arXiv:[\d.]*\d", row[4])), name
    assert names("losses.md", "`f_divergence_type`") == list(DIVERGENCES)
    for row in table("losses.md", "`f_divergence_type`"):
        score = link(symbols["L"], divergence=ticked(row[0])[0], alpha=symbols["alpha"])
        assert torch.allclose(score, eval(ticked(row[1])[0], symbols)), row[0]


def test_the_pages_of_preference_methods_name_every_finding_and_metric():
    from posttrain.checks import pairs, rules
    from posttrain.methods import dpo, orpo, preference

    source = "".join(map(inspect.getsource, (pairs, rules)))
    codes = re.findall(r'^ +"(PT-[DP]\d{3})",(?:$| "warning"| \()', source, re.M)
    assert sorted(names("dpo.md", "code")) == sorted(set(codes)) and len(codes) > 10
    logged = re.compile(r'"([a-z_]+(?:/[a-z_]+)?)": mean|metrics\["([a-z_/]+)"\] = mean')
    for page, modules in (("dpo.md", [dpo]), ("reference_free.md", [orpo])):
        shared = [preference.likelihood_terms] if page == "reference_free.md" else [preference.pair_metrics]
        parts = [*modules, preference._reward_metrics, *shared]
        found = {a or b for part in parts for a, b in logged.findall(inspect.getsource(part))}
        assert len(found) > 5 and found <= set(names(page, "metric")), (page, found)
    sides = {f"{kind}/{side}" for kind in ("rewards", "logps") for side in ("chosen", "rejected")}
    assert sides | {"rewards/margins", "entropy"} <= set(names("kto_bco.md", "metric"))
    assert str(preference.BALANCED) in (DOCS / "kto_bco.md").read_text(encoding="utf-8")


def test_the_table_of_adapters_is_the_fields_of_model_config():
    from posttrain import ModelConfig

    assert options("peft.md", "option") == {f.name: default_of(f) for f in dataclasses.fields(ModelConfig)}


def test_the_table_of_template_families_is_the_one_of_the_code():
    from posttrain.data.templates import FAMILIES

    rows = table("chat_templates.md", "family")
    assert [(ticked(row[0])[0], ticked(row[1])[0]) for row in rows] == [(f.name, f.file) for f in FAMILIES]


def test_the_tables_of_template_findings_and_response_formats_are_those_of_the_code():
    from posttrain import apply_chat_template
    from posttrain.data.responses import FORMATS
    from posttrain.data.templates import PROBLEMS

    found = {ticked(row[0])[0]: tuple(row[1:3]) for row in table("chat_templates.md", "finding")}
    assert found == {code: problem[:2] for code, problem in PROBLEMS.items()}
    assert names("chat_templates.md", "format") == list(FORMATS)
    wanted = {name: value for name, value in defaults_of(apply_chat_template).items() if name != "template_kwargs"}
    assert options("chat_templates.md", "argument") == wanted


def test_the_tables_of_callbacks_are_those_of_the_code():
    import transformers

    from posttrain import BEMACallback, LogCompletionsCallback, WeaveCallback

    public = {name: getattr(posttrain, name) for name in posttrain.__all__ if name.endswith("Callback")}
    assert names("callbacks.md", "callback") == sorted(public)
    assert all(issubclass(kind, transformers.TrainerCallback) for kind in public.values())
    for kind in (BEMACallback, LogCompletionsCallback, WeaveCallback):
        assert options("callbacks.md", f"argument of `{kind.__name__}`") == defaults_of(kind), kind


def test_the_tables_of_commands_are_those_of_the_code():
    from posttrain.cli.main import COMMANDS
    from posttrain.cli.train import CONFIGS, ScriptArguments
    from posttrain.extensions.page.inspect_command import EXAMPLES, ROWS

    assert sorted(names("cli.md", "command")) == sorted(COMMANDS)
    assert sorted(names("inspect.md", "command")) == sorted(ROWS)
    assert options("cli.md", "option") == {f.name: default_of(f) for f in dataclasses.fields(ScriptArguments)}
    assert sorted(names("cli.md", "`--accelerate_config`")) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert options("inspect.md", "option")["--examples"] == str(EXAMPLES)


def test_the_table_of_findings_names_every_check_of_rows():
    from posttrain.checks import rows

    codes = re.findall(r'^ +"(PT-D\d{3})",(?:$| _)', inspect.getsource(rows), re.M)
    assert sorted(names("inspect.md", "code")) == sorted(set(codes))


# Commands ------------------------------------------------------------------------------------------------------------------


def joined(code):
    """The lines of a script as a shell reads them."""
    return code.replace("\\\n", " ").splitlines()


def test_commands_fit_a_page_without_scrolling():
    for page in sorted(DOCS.rglob("*.md")):
        for code in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            assert not [line for line in code.splitlines() if len(line.partition("  #")[0]) > 100], page


def commands():
    lines = [line for page in PAGES for code, _ in blocks(page, "bash") for line in joined(code)]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("posttrain ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_understood(words):
    """Every flag of a command on the page is an option of it, of its launcher, or of `inspect`."""
    from posttrain.cli import train
    from posttrain.cli.commands import TRAINING
    from posttrain.cli.main import COMMANDS
    from posttrain.extensions.page import inspect_command as inspection

    name, *rest = words
    assert name in COMMANDS
    if name == "inspect":
        _, rest = inspection._parser().parse_known_args(rest)
        name = words[1]
        assert name in inspection.ROWS
    if name in TRAINING:
        rest, _ = train._accelerate_shortcut(rest)
        at = rest.index("--config") if "--config" in rest else len(rest)
        rest = rest[:at] + rest[at + 2 :]
        required = [] if "--output_dir" in rest else ["--output_dir", "runs"]
        *_, unknown = train.parser_for(name).parse_args_and_config([*rest, *required], return_remaining_strings=True)
        train._launch_flags(unknown, name)


@pytest.mark.parametrize("page", with_blocks("yaml"))
def test_config_files_are_understood(page, tmp_path, monkeypatch):
    from posttrain.cli.train import parser_for

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # One page sets it; undone afterwards.
    for code, _ in blocks(page, "yaml"):
        path = tmp_path / "config.yaml"
        path.write_text(code, encoding="utf-8")
        _, config, _, mixture = parser_for("sft").parse_args_and_config(["--config", str(path)])
        assert config.loss_type == "nll"
        assert len(mixture.datasets) == code.count("- path:")


# Pages whose tables of options have defaults, and where these stand in the code; None: no signature has them.
DEFAULTS = {
    "a2po.md": posttrain.A2POConfig,
    "chat_templates.md": posttrain.apply_chat_template,
    "cli.md": None,
    "clusters.md": None,
    "dataset_formats.md": None,
    "dpo.md": posttrain.DPOConfig,
    "grpo.md": posttrain.GRPOConfig,
    "inspect.md": None,
    "kto_bco.md": None,
    "online_dpo.md": posttrain.OnlineDPOConfig,
    "packing.md": None,
    "peft.md": posttrain.ModelConfig,
    "ppo.md": posttrain.PPOConfig,
    "reference_free.md": None,
    "reward.md": posttrain.RewardConfig,
    "rloo.md": posttrain.RLOOConfig,
    "rollouts.md": None,
    "sft.md": posttrain.SFTConfig,
    "tools.md": posttrain.GRPOConfig,
    "vision.md": posttrain.SFTConfig,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_defaults_that_a_table_says_are_those_of_the_code(page):
    for header, rows in tables(page):
        columns = [name.lower() for name in header]
        if "default" not in columns or page == "migration.md":
            continue
        named = re.search(r"`(\w+)`", header[0])
        owner = getattr(posttrain, named[1]) if named else DEFAULTS[page]
        if owner is None:
            continue
        own = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
        known = {one.name: default_of(one) for one in own} or defaults_of(owner)
        for row in rows:
            options, said = ticked(row[0]), ticked(row[columns.index("default")])
            if len(options) == len(said):
                wrong = {
                    k: (v, known[k])
                    for k, v in zip(options, said, strict=True)
                    if ast.literal_eval(v) != ast.literal_eval(known[k])
                }
                assert not wrong, f"{page}: {wrong}"


def results(name):
    """Speed, memory, widest vectors and pairs of every comparison that a benchmark recorded, as pages show them."""

    def rows(value, hardware):
        if isinstance(value, dict):
            if "speed_up" in value:
                speed, memory = value["speed_up"], value.get("memory_ratio")
                shown = "{median:.1f}x ({min:.1f} to {max:.1f})".format(**speed)
                yield [shown, f"{memory['median']:.2f}" if memory else "not measured", hardware, str(speed["pairs"])]
            for part in value.values():
                yield from rows(part, hardware)

    for file in (DOCS.parent / "benchmarks" / "results").glob(f"{name}*.json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        if "hardware" in result:
            yield from rows(result, "AVX-512" if "avx512f" in result["hardware"]["flags"] else "AVX2")


def test_the_figures_of_benchmarks_are_the_recorded_ones():
    shown = table("benchmarks.md", "task")
    for row in shown:
        assert row[1:5] in list(results(re.search(r"benchmarks/(\w+)\.py", row[5])[1])), row
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    figures = [cells(line) for line in readme.splitlines() if line.startswith("|") and "AVX" in line]
    known = {(speed.split()[0], f"{memory}x", f"2 CPU cores, {hardware}") for _, speed, memory, hardware, *_ in shown}
    assert figures and {tuple(row[1:]) for row in figures} <= known


def test_the_page_for_contributors_names_files_that_are_there_and_hold_what_it_says():
    root = DOCS.parent
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [path for path in ticked(text) if re.fullmatch(r"[\w./]+", path) and "/" in path]
    assert paths and all((root / path).exists() for path in paths)
    (export,) = re.findall(r"public names in `([^`]+)`", text)
    assert "ORPOTrainer" in (root / export).read_text(encoding="utf-8")
