"""`migrate_script`: rewrite a script of TRL with the table in `posttrain.compat.trl_names`. The formatting is preserved."""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider
from transformers import TrainingArguments

import posttrain
from posttrain.compat import old_names
from posttrain.compat.overrides import hook_for
from posttrain.compat.paths import BY_MODULE
from posttrain.compat.trl_names import ANY, TRLName, advice, imports, value_row
from posttrain.errors import DataError
from posttrain.extensions.migrate.behavior import EOS, PACKING, REMOVED, WRAPPED, changed_defaults
from posttrain.extensions.migrate.note import Note
from posttrain.methods.sft import OLD_DATASET_KWARGS

PACKAGES = ("trl", "posttrain")
SHARED = "TrainingArguments"  # Class of transformers that trainers of older TRL releases accepted as config.
# Parser of transformers. Unlike `TrlParser`, it does not convert options of older releases.
PLAIN_PARSER = "HfArgumentParser"
PARSERS = {"TrlParser", PLAIN_PARSER}
COLLATOR = "DPODataCollatorWithPadding"
TEXTS = ("formatting_func", "dataset_text_field")  # Arguments that have an effect only on rows of plain text.

ADDED_TOKENS = (
    "add_special_tokens: removed. Rows of messages get the tokens of the chat template alone, as before; for rows of text set "
    "tokenizer.add_bos_token=False."
)


def migrate_script(text: str, path: str) -> tuple[str, list[Note]]:
    """Rewrite a script of TRL for this package.

    Args:
        text: Source code of the script.
        path: Path of the script, for error messages.

    Returns:
        The new source code, and notes about places that must be changed manually.

    Raises:
        DataError: The text is not valid Python. The message contains the path and the line.
    """
    if not any(package in text for package in PACKAGES):
        return text, []
    module = parsed(text, path)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    script = Script(wrapper.resolve(PositionProvider))
    wrapper.module.visit(script)
    if not (script.imported or script.modules or script.starred):
        return text, []
    script.collect_moves()
    script.note_readers()
    changed = wrapper.module.visit(Rewriter(script)).code
    fault = fault_of(changed)
    if fault is not None and fault_of(text) is None:
        place = f"the migrated line {fault.lineno} would be invalid ({fault.msg}): {(fault.text or '').strip()}"
        return text, [
            Note(1, f"The file was not changed, because {place}. Migrate it manually."),
            *sorted(set(script.notes)),
        ]
    return changed, sorted(set(script.notes))


def fault_of(text: str) -> SyntaxError | None:
    """Return the syntax error of source code. Return None if Python can compile the code."""
    try:
        compile(text, "script", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        return error
    return None


def parsed(text: str, path: str) -> cst.Module:
    """Parse the source code of a script.

    Raises:
        DataError: The text is not valid Python. The message contains the path and the line.
    """
    try:
        return cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise DataError(f"{path}:{error.raw_line}: the file is not valid Python: {error.message}") from error


class Script(cst.CSTVisitor):
    """Analysis of a script: its imports, its variables with configs, parsers and trainers, and the calls that create these
    objects.

    Attributes:
        positions: Positions of syntax nodes in the source code.
        imported: Mapping from local names to the names in TRL under which they were imported.
        modules: Local names of the packages `trl` and `posttrain`.
        starred: Whether the script imports all names of a package (``import *``).
        is_of_trl: Whether the script imports from `trl`.
        is_old: Whether the script has code for TRL releases before ``packing_strategy``, which TRL no longer accepts.
        own: Mapping from classes that the script defines to their annotated fields.
        dropped: Imported names that are no longer used after the migration.
        classes: Classes of this package by local name, including subclasses that the script defines.
        kinds: Mapping from variables to the class of this package of which they contain an instance.
        made: Mapping from variables to the calls that create their value.
        lines: Mapping from variables to the line of their assignment.
        mappings: Mapping from variables to the keys of the dict that they contain.
        calls: Mapping from calls of classes of this package to the class.
        added: Arguments that move from calls of trainers to calls of configs, by call of the config.
        replaced: Names of the configs that replace ``TrainingArguments``, by call.
        renamed: Mapping from local names to new names.
        needed: Names that the migrated script must import.
        uses: Number of occurrences of each name. Imports of ``TrainingArguments`` are not counted.
        notes: Places that must be changed manually.
    """

    def __init__(self, positions: Mapping[cst.CSTNode, Any]) -> None:
        super().__init__()
        self.positions = positions
        self.imported: dict[str, str] = {}
        self.modules: set[str] = set()
        self.starred = False
        self.is_of_trl = False
        self.is_old = False
        self.own: dict[str, dict[str, cst.AnnAssign]] = {}
        self.own_parsers: set[str] = set()
        self.read: list[tuple[cst.Call, list[str]]] = []
        self.dropped: set[str] = set()
        self.deleted: set[cst.Call] = set()
        self.classes: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self.parsers: dict[str, list[Any]] = {}
        self.made: dict[str, list[cst.Call]] = {}
        self.lines: dict[str, int] = {}
        self.mappings: dict[str, list[str]] = {}
        self.calls: dict[cst.Call, Any] = {}
        self.added: dict[cst.Call, list[cst.Arg]] = {}
        self.moved: dict[cst.Call, set[str]] = {}
        self.replaced: dict[cst.Call, str] = {}
        self.renamed: dict[str, str] = {}
        self.needed: set[str] = set()
        self.uses: Counter[str] = Counter()
        self.notes: list[Note] = []

    def line(self, node: cst.CSTNode) -> int:
        """Return the line at which a node begins."""
        return self.positions[node].start.line

    def note(self, node: cst.CSTNode, text: str, argument: str = "", *, check: bool = False) -> None:
        """Add a note about a node, or about the argument ``argument`` of a call."""
        place = by_name(node).get(argument, node) if isinstance(node, cst.Call) else node
        self.notes.append(Note(self.line(place), text, check=check))

    def visit_Import(self, node: cst.Import) -> None:
        """Record the local names of the packages `trl` and `posttrain`."""
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            self.is_of_trl |= name.partition(".")[0] == "trl"
            if name.partition(".")[0] in PACKAGES:
                self.modules.add(alias.evaluated_alias or name.partition(".")[0])

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        """Record imported names and classes. Add notes about names that this package does not have."""
        package = get_full_name_for_node(node.module) or "" if node.module else ""
        self.is_of_trl |= package.partition(".")[0] == "trl"
        if isinstance(node.names, cst.ImportStar) or node.relative:
            self.starred |= package.partition(".")[0] in PACKAGES and not node.relative
            return
        for alias in node.names:
            name, local = str(alias.evaluated_name), alias.evaluated_alias or str(alias.evaluated_name)
            if package == "transformers" and name == SHARED:
                self.uses[SHARED] -= 1
                self.classes[local] = posttrain.PostTrainingConfig
            if package.partition(".")[0] not in PACKAGES:
                continue
            self.imported[local] = name
            row = imports().get(name)
            if row is not None and row.action == "refuse":
                self.note(node, missing(name, row))
            elif row is not None and row.replacement.startswith("posttrain.") and row.replacement.count(".") == 1:
                name = row.replacement.removeprefix("posttrain.")
                if alias.asname is None:
                    self.renamed[local] = name
            if (cls := class_of(name)) is not None:
                self.classes[local] = cls

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        """Record a class definition. Add notes about overridden methods that this package never calls."""
        parts = [part for item in node.body.body if isinstance(item, cst.SimpleStatementLine) for part in item.body]
        self.own[node.name.value] = {code(part.target): part for part in parts if isinstance(part, cst.AnnAssign)}
        if any(code(item.value) in PARSERS for item in node.bases):
            self.own_parsers.add(node.name.value)
        base = next((kind for item in node.bases if (kind := self.kind_of(item.value))), None)
        if base is None:
            return
        self.classes[node.name.value] = base
        for item in node.body.body:
            if isinstance(item, cst.FunctionDef) and (hook := hook_for(base, item.name.value)):
                self.note(
                    item, f"{node.name.value} overrides {item.name.value}, which is never called. Use {hook} instead."
                )

    def kind_of(self, node: cst.BaseExpression) -> Any:
        """Return the class of this package that an expression names, or None."""
        name = get_full_name_for_node(node) or ""
        head, _, last = name.rpartition(".")
        if name == f"transformers.{SHARED}":
            return posttrain.PostTrainingConfig
        if head.partition(".")[0] in self.modules or (self.starred and not head):
            return self.classes.get(name) or class_of(last)
        return self.classes.get(name)

    def visit_Call(self, node: cst.Call) -> None:
        """Record calls of classes of this package. Add notes about calls of methods that do not exist in this package."""
        kind, function = self.kind_of(node.func), code(node.func)
        if kind is not None:
            self.calls[node] = kind
        elif node.args and function in PARSERS | self.own_parsers:
            first = node.args[0].value
            items = [item.value for item in first.elements] if isinstance(first, cst.Tuple | cst.List) else [first]
            self.read.append((node, [code(item) for item in items]))
        if isinstance(node.func, cst.Attribute) and isinstance(node.func.value, cst.Name):
            trainer = self.kinds.get(node.func.value.value)
            if trainer is not None and not is_dataclass(trainer) and (hook := hook_for(trainer, node.func.attr.value)):
                self.note(node, f"{trainer.__name__}.{node.func.attr.value} does not exist in posttrain. Use {hook}.")

    def visit_Assign(self, node: cst.Assign) -> None:
        """Record the values of variables."""
        target, value = node.targets[0].target, node.value
        for name in names_in(target):
            self.lines[name] = self.line(node)
        if isinstance(target, cst.Name) and (keys := keys_of(value)) is not None:
            self.mappings[target.value] = keys
        if not isinstance(value, cst.Call):
            return
        function = get_full_name_for_node(value.func) or ""
        if isinstance(target, cst.Name):
            kind = self.kind_of(value.func)
            if kind is not None:
                self.kinds[target.value] = kind
                self.made.setdefault(target.value, []).append(value)
            elif function.rpartition(".")[2] in PARSERS and value.args:
                first = value.args[0].value
                items = [item.value for item in first.elements] if isinstance(first, cst.Tuple | cst.List) else [first]
                self.parsers[target.value] = [self.kind_of(item) for item in items]
                if function == PLAIN_PARSER and any(self.parsers[target.value]):
                    self.renamed[PLAIN_PARSER] = "TrlParser"
                    self.needed.add("TrlParser")
        elif isinstance(target, cst.Tuple) and function.partition(".")[0] in self.parsers:
            for item, kind in zip(target.elements, self.parsers[function.partition(".")[0]], strict=False):
                if isinstance(item.value, cst.Name) and kind is not None:
                    self.kinds[item.value.value] = kind

    def collect_moves(self) -> None:
        """Find arguments of trainers that are now options of configs, and find the calls that create these configs."""
        self.is_old = "ConstantLengthDataset" in self.imported.values()
        for call, kind in self.calls.items():
            self.is_old |= bool(REMOVED & by_name(call).keys()) or (
                self.is_of_trl and kind is posttrain.PostTrainingConfig
            )
            if is_dataclass(kind):
                continue
            moved = [
                arg for arg in call.args if arg.keyword and is_option(kind, arg.keyword.value, value_of(arg.value))
            ]
            config_arg, config = given_config(kind, call), kind.config_class
            target = self.config_call(config_arg)
            self.is_old |= bool(moved)
            self.drop_collator(call)
            if target is not None and moved and self.calls[target] is posttrain.PostTrainingConfig:
                self.replaced[target] = config.__name__
                self.calls[target] = config
                self.needed.add(config.__name__)
            if not moved:
                continue
            if config_arg is None and not any(arg.star for arg in call.args):
                self.needed.add(config.__name__)
            elif target is None:
                names = ", ".join(arg.keyword.value for arg in moved if arg.keyword)
                self.note(
                    call,
                    f"{names}: options of {config.__name__}. Pass them to the config that is passed as args."
                    + f" Also pass {WRAPPED}, the packing of TRL up to 0.18." * ("packing" in names),
                )
                continue
            elif late := [
                name for arg in moved for name in names_in(arg.value) if self.lines.get(name, 0) > self.line(target)
            ]:
                self.note(call, f"{', '.join(late)}: assigned after {config.__name__}(...), which has this option.")
                continue
            else:
                self.added[target] = [*self.added.get(target, []), *moved]
            self.moved[call] = {arg.keyword.value for arg in moved if arg.keyword}

    def drop_collator(self, call: cst.Call) -> None:
        """Mark the collator of preference rows for removal (TRL 0.7 to 0.11), because trainers now create their own
        collator.
        """
        collator = by_name(call).get("data_collator")
        name = code(collator.value.func) if collator is not None and isinstance(collator.value, cst.Call) else ""
        if self.imported.get(name) == COLLATOR:
            self.deleted.add(call)
            self.uses[name] -= 1
            if self.uses[name] == 1:  # Only the import statement is left.
                self.dropped.add(name)
                self.notes = [note for note in self.notes if not note.text.startswith(f"{COLLATOR} does not exist")]

    def note_readers(self) -> None:
        """Add notes about parsers of ``TrainingArguments``, because such parsers reject options of older releases. Also
        add notes about other parsed configs whose defaults changed.
        """
        configs = {kind.config_class for kind in self.calls.values() if not is_dataclass(kind)}
        config = configs.pop() if len(configs) == 1 else posttrain.PostTrainingConfig
        new = options_of(config) - options_of(TrainingArguments)
        readers = [(call, name, names) for call, names in self.read for name in names]
        for call, name, names in readers:
            kind = self.classes.get(name)
            if kind is not posttrain.PostTrainingConfig:
                if self.is_of_trl and is_dataclass(kind) and (text := changed_defaults(kind, self.own.get(name, ()))):
                    self.note(call, text, check=True)
                continue
            own = [field for field in self.own.get(name, ()) if field in options_of(config) or row_of(config, field)]
            fix = (
                f"Derive it from posttrain.{config.__name__}"
                if name in self.own
                else f"Use posttrain.{config.__name__}"
            )
            fields_too = f" Remove fields that it already has: {', '.join(own)}." if own else ""
            self.note(
                call,
                f"{name}: transformers refuses options of older releases on the command line and in files (warmup_ratio, "
                f"evaluation_strategy). {fix}, and read it with posttrain.TrlParser.{fields_too}",
            )
            others = [
                (other, field) for other in names if other != name for field in self.own.get(other, {}) if field in new
            ]
            for other, field in others:
                self.note(
                    self.own[other][field],
                    f"{other}.{field}: remove it when posttrain.{config.__name__} replaces {name}, and read the option of the "
                    "config. A parser refuses two classes with the same option.",
                )

    def is_free_of_shared(self) -> bool:
        """Return whether all uses of ``TrainingArguments`` in the script are replaced."""
        return bool(self.replaced) and self.uses[SHARED] == len(self.replaced)

    def visit_Name(self, node: cst.Name) -> None:
        """Count the occurrences of a name."""
        self.uses[node.value] += 1

    def config_call(self, given: cst.BaseExpression | None) -> cst.Call | None:
        """Return the call that creates the config ``given``. Return None if there is no such call or more than one."""
        if isinstance(given, cst.Call):
            return given if given in self.calls else None
        made = self.made.get(given.value, []) if isinstance(given, cst.Name) else []
        return made[0] if len(made) == 1 else None


class Rewriter(cst.CSTTransformer):
    """Transformer that rewrites imports, names, arguments and attributes."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self.needed = script.needed - {name for local, name in script.imported.items() if local == name}

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        """Replace the package `trl` by `posttrain`."""
        return updated_node.with_changes(
            names=[alias.with_changes(name=renamed_package(alias.name)) for alias in updated_node.names]
        )

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel | cst.RemovalSentinel:
        """Rewrite an import from `trl`. Names that are now in another module get a separate import statement."""
        node = updated_node.body[0]
        if not isinstance(node, cst.ImportFrom) or node.module is None or node.relative:
            return updated_node
        package = get_full_name_for_node(node.module) or ""
        if package == "transformers" and not isinstance(node.names, cst.ImportStar):
            return self.without_unused(updated_node, node)
        if package.partition(".")[0] not in PACKAGES:
            return updated_node
        if isinstance(node.names, cst.ImportStar):
            return updated_node.with_changes(body=[node.with_changes(module=renamed_package(node.module))])
        below = package.partition(".")[2]
        dropped = self.script.dropped
        imported = [part for part in node.names if (part.evaluated_alias or part.evaluated_name) not in dropped]
        if not imported:
            return cst.RemoveFromParent()
        imported[-1] = imported[-1].with_changes(comma=node.names[-1].comma)
        groups: dict[str, list[cst.ImportAlias]] = {}
        for alias in imported:
            module, new = place_of(
                str(alias.evaluated_name),
                f"posttrain.{below}" if below else "posttrain",
                moves=package.startswith("trl"),
            )
            if new != alias.evaluated_name:
                local = alias.asname or cst.AsName(cst.Name(str(alias.evaluated_name)))
                alias = alias.with_changes(
                    name=cst.Name(new), asname=None if new in self.script.renamed.values() else local
                )
            groups.setdefault(module, []).append(alias)
        if self.needed and "posttrain" in groups:
            groups["posttrain"] += [cst.ImportAlias(cst.Name(name)) for name in sorted(self.needed)]
            self.needed = set()
        if list(groups) == [package] and len(groups[package]) == len(node.names):
            return updated_node.with_changes(body=[node.with_changes(names=groups[package])])
        lines = []
        for module, names in groups.items():
            base, last = node, node.names[-1].comma
            if module != next(iter(groups)):
                base, last = node.with_changes(lpar=None, rpar=None), cst.MaybeSentinel.DEFAULT
            new = base.with_changes(module=dotted(module), names=joined(names, last, one_line=base.lpar is None))
            leading = () if lines else updated_node.leading_lines
            lines.append(updated_node.with_changes(body=[new], leading_lines=leading))
        return cst.FlattenSentinel(lines)

    def without_unused(self, line: cst.SimpleStatementLine, node: cst.ImportFrom) -> cst.SimpleStatementLine:
        """Remove names that this package replaces from an import of transformers. If no other name is left, keep the import."""
        unused = {PLAIN_PARSER} & self.script.renamed.keys()
        unused |= {SHARED} if self.script.is_free_of_shared() else set()
        parts: Any = node.names
        names = [alias for alias in parts if alias.evaluated_name not in unused]
        if not names or len(names) == len(parts):
            return line
        names[-1] = names[-1].with_changes(comma=parts[-1].comma)
        return line.with_changes(body=[node.with_changes(names=names)])

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Add an import statement for the names that could not be added to an existing statement."""
        if not self.needed:
            return updated_node
        names = [cst.ImportAlias(cst.Name(name)) for name in sorted(self.needed)]
        line = cst.SimpleStatementLine(
            [cst.ImportFrom(cst.Name("posttrain"), joined(names, cst.MaybeSentinel.DEFAULT, one_line=True))]
        )
        first = next(
            i for i, part in enumerate(updated_node.body) if "import posttrain" in updated_node.code_for_node(part)
        )
        body = [*updated_node.body[: first + 1], line, *updated_node.body[first + 1 :]]
        return updated_node.with_changes(body=body)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        """Replace a local name by its new name."""
        new = self.script.renamed.get(updated_node.value)
        return updated_node.with_changes(value=new) if new else updated_node

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Skip names in imports, because `leave_SimpleStatementLine` handles them."""
        return False

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        """Replace the package `trl`, moved classes, and renamed options that are read from a config."""
        base = original_node.value
        if not isinstance(base, cst.Name):
            return updated_node
        name = original_node.attr.value
        if base.value == "trl" and "trl" in self.script.modules:
            module, new = place_of(name, "posttrain")
            if (row := imports().get(name)) and row.action == "refuse":
                self.script.note(original_node, missing(name, row))
            return updated_node.with_changes(value=dotted(module), attr=cst.Name(new))
        kind = self.script.kinds.get(base.value)
        row = None if kind is None else old_names.row_of(kind, name)
        if row is not None and row.action == "rename" and row.replacement.isidentifier():
            return updated_node.with_changes(attr=cst.Name(row.replacement))
        if row is not None and row.action != "keep":
            self.script.note(original_node, f"{base.value}.{name}: {row.replacement}")
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Convert the arguments in a call of a config or a trainer."""
        kind = self.script.calls.get(original_node)
        if kind is None:
            return self.with_old_flags(with_dtype(updated_node))
        moved = self.script.moved.get(original_node, set())
        call = updated_node
        for name in [*moved, *(["data_collator"] if original_node in self.script.deleted else [])]:
            call = without(call, name)
        if moved and given_config(kind, call) is None:
            options = [arg for arg in updated_node.args if arg.keyword and arg.keyword.value in moved]
            config = cst.Call(cst.Name(kind.config_class.__name__))
            for option in options:
                config = with_argument(config, option)
            config = self.converted(original_node, kind.config_class, config)
            call = with_argument(call, cst.Arg(config, cst.Name("args"), equal=equal_sign(call)))
        for arg in self.script.added.get(original_node, ()):
            # In TRL, an argument of the trainer had priority over the config's option.
            keyword = arg.keyword
            is_given = keyword is not None and keyword.value in by_name(call)
            call = (
                exchanged(call, keyword.value, keyword, arg.value) if keyword and is_given else with_argument(call, arg)
            )
        if original_node in self.script.replaced:
            call = with_defaults(call, kind).with_changes(func=cst.Name(self.script.replaced[original_node]))
        for arg in original_node.args:
            if arg.star == "**":
                self.look_into(arg, kind)
        return self.converted(original_node, kind, call)

    def with_old_flags(self, call: cst.Call) -> cst.Call:
        """Replace a method of transformers' parser by the method of this package that converts options of older releases."""
        name = get_full_name_for_node(call.func) or ""
        variable, _, method = name.partition(".")
        kinds = self.script.parsers.get(variable, ())
        if method != "parse_args_into_dataclasses" or call.args or not any(kinds):
            return call
        return call.with_changes(func=dotted(f"{variable}.parse_args_and_config"))

    def look_into(self, arg: cst.Arg, kind: type) -> None:
        """Add notes about old argument names in a mapping that is unpacked in a call (``**mapping``)."""
        keys = keys_of(arg.value) or self.script.mappings.get(code(arg.value))
        if keys is None:
            self.script.note(arg, f"{kind.__name__}({code(arg).strip(', ')}): names in the mapping were not checked.")
        for name in keys or ():
            row = row_of(kind, name)
            if row is not None or old_names.is_unknown(kind, name):
                self.script.note(arg, f"{name}: {row.replacement if row else f'{kind.__name__} has no such argument'}")

    def converted(self, node: cst.Call, kind: type, call: cst.Call) -> cst.Call:
        """Convert the arguments of a call that have an old name or an old value."""
        for name, arg in by_name(call).items():
            value = value_of(arg.value)
            row = row_of(kind, name, value)
            if name.startswith("vllm_") and row is not None and row.action == "refuse" and without_vllm(call):
                call = without(call, name)
            elif name == "dataset_kwargs" and isinstance(value, dict) and issubclass(kind, posttrain.SFTConfig):
                call = self.without_old_keys(node, call, value)
            elif old := value_row(kind, name, value):
                call = self.value(node, call, name, old)
            elif row is not None and row.action != "keep":
                call = self.argument(node, kind, call, name, row)
            elif row is None and old_names.is_unknown(kind, name) and kind is not posttrain.PostTrainingConfig:
                self.script.note(node, f"{kind.__name__} has no argument {name}.", name)
        return self.checked(node, kind, call)

    def checked(self, node: cst.Call, kind: type, call: cst.Call) -> cst.Call:
        """Add the option with which packing works as in older releases. Add notes about changed defaults and the EOS token."""
        script, args = self.script, by_name(call)
        if issubclass(kind, posttrain.SFTTrainer):
            made = script.config_call(given_config(kind, node))
            old = (by_name(made) if made else {}) | by_name(node)
            packed = "packing" in old and value_of(old["packing"].value) is True
            if script.is_old and not packed and any(name in old and value_of(old[name].value) != "" for name in TEXTS):
                script.note(node, EOS, check=True)
        packs = "packing" in args and value_of(args["packing"].value) not in (False, None)
        if issubclass(kind, posttrain.SFTConfig) and packs and "packing_strategy" not in args:
            if script.is_old:
                value = cst.SimpleString('"wrapped"')
                call = with_argument(call, cst.Arg(value, cst.Name("packing_strategy")))
            elif script.is_of_trl:
                script.note(node, PACKING, "packing", check=True)
        mappings = [keys_of(arg.value) or script.mappings.get(code(arg.value)) for arg in call.args if arg.star == "**"]
        if (
            is_dataclass(kind)
            and script.is_of_trl
            and kind is not posttrain.PostTrainingConfig
            and None not in mappings
        ):
            names = {*args, *(key for keys in mappings for key in keys or ()), *script.own.get(code(node.func), ())}
            if text := changed_defaults(kind, names):
                script.note(node, text, check=True)
        return call

    def value(self, node: cst.Call, call: cst.Call, name: str, row: TRLName) -> cst.Call:
        """Replace an outdated value of an argument whose name did not change."""
        if row.action == "ignore":
            return without(call, name)
        text = code(by_name(call)[name].value)
        if row.action == "refuse":
            self.script.note(node, f"{name}={text}: {row.replacement}", name)
            return call
        return exchanged(call, name, cst.Name(name), cst.parse_expression(f"{text[-1]}{row.replacement}{text[-1]}"))

    def argument(self, node: cst.Call, kind: type, call: cst.Call, name: str, row: TRLName) -> cst.Call:
        """Rename, move or remove one argument, as the argument's row in the table of names requires."""
        args = by_name(call)
        arg, value = args[name], value_of(args[name].value)
        target, _, literal = row.replacement.partition("=")
        if row.action == "refuse" or (literal and value is ANY):
            self.script.note(node, f"{name}: {row.replacement}", name)
            return call
        if row.action == "ignore" or value is None or (literal and not value):
            return without(call, name)
        if row.action == "loss":
            return self.with_loss(node, kind, call, name, target)
        option, _, key = target.partition(".")
        if key:
            return self.with_key(node, call, name, option, key)
        if option == "warmup_steps" and option in args and value_of(args[option].value) == 0:
            call, args = without(call, option), {}
        new = cst.parse_expression(literal) if literal else arg.value
        if option in args:
            shown = [code(part) for part in (new, args[option].value)]
            if shown[0] == shown[1]:
                return without(call, name)
            self.script.note(node, f"{name}={shown[0]} and {option}={shown[1]} are both set. Keep one of them.", name)
            return call
        return exchanged(call, name, cst.Name(option), new)

    def without_old_keys(self, node: cst.Call, call: cst.Call, value: dict[str, Any]) -> cst.Call:
        """Remove keys of ``dataset_kwargs`` that TRL has ignored since 0.13."""
        remaining = {key: item for key, item in value.items() if key not in OLD_DATASET_KWARGS}
        if remaining == value:
            return call
        if value.get("add_special_tokens") is False:
            self.script.note(node, ADDED_TOKENS, "dataset_kwargs")
        if not remaining:
            return without(call, "dataset_kwargs")
        return exchanged(call, "dataset_kwargs", cst.Name("dataset_kwargs"), cst.parse_expression(repr(remaining)))

    def with_key(self, node: cst.Call, call: cst.Call, name: str, option: str, key: str) -> cst.Call:
        """Move the argument ``name`` into the dict of the argument ``option``, as the value of ``key``."""
        args = by_name(call)
        element = cst.DictElement(cst.SimpleString(f'"{key}"'), args[name].value)
        if option not in args:
            return exchanged(call, name, cst.Name(option), cst.Dict([element]))
        mapping = args[option].value
        if not isinstance(mapping, cst.Dict):
            self.script.note(node, f"{name}: move it to {option}, with the key {key!r}.", name)
            return call
        elements = [*mapping.elements]
        if elements and isinstance(elements[-1].comma, cst.MaybeSentinel):
            elements[-1] = elements[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        mapping = mapping.with_changes(elements=[*elements, element])
        return without(exchanged(call, option, cst.Name(option), mapping), name)

    def with_loss(self, node: cst.Call, kind: type, call: cst.Call, name: str, loss: str) -> cst.Call:
        """Convert an argument with the weight of a loss term to an entry in ``loss_type`` and an entry in ``loss_weights``."""
        args = by_name(call)
        losses = value_of(args["loss_type"].value) if "loss_type" in args else old_names.default_losses(kind)
        losses = [losses] if isinstance(losses, str) else losses
        weights = value_of(args["loss_weights"].value) if "loss_weights" in args else None
        if ANY in (losses, weights):
            self.script.note(node, f"{name}: add {loss!r} to loss_type, and the value to loss_weights.", name)
            return call
        weights = weights or [1.0] * len(losses)
        new = {
            "loss_type": repr([*losses, loss]).replace("'", '"'),
            "loss_weights": f"[{', '.join([*map(repr, weights), code(args[name].value)])}]",
        }
        for option, text in new.items():
            value = cst.parse_expression(text)
            if option in args:
                call = exchanged(call, option, cst.Name(option), value)
            else:
                call = with_argument(call, cst.Arg(value, cst.Name(option)))
        return without(call, name)


def with_dtype(call: cst.Call) -> cst.Call:
    """Rename ``torch_dtype`` in calls of ``from_pretrained`` and ``from_config`` of transformers."""
    method = (get_full_name_for_node(call.func) or "").rpartition(".")[2]
    if (
        method not in ("from_pretrained", "from_config")
        or "torch_dtype" not in by_name(call)
        or "dtype" in by_name(call)
    ):
        return call
    return exchanged(call, "torch_dtype", cst.Name("dtype"), by_name(call)["torch_dtype"].value)


def missing(name: str, row: TRLName) -> str:
    """Return a note about a name that has no equivalent in this package."""
    fix = advice(row.replacement)
    return f"{name} does not exist in posttrain. {fix[0].upper()}{fix[1:]}."


def code(node: cst.CSTNode) -> str:
    """Return the source code of a node."""
    return cst.Module([]).code_for_node(node)


def by_name(call: cst.Call) -> dict[str, cst.Arg]:
    """Return the keyword arguments of a call by their names."""
    return {arg.keyword.value: arg for arg in call.args if arg.keyword}


def exchanged(call: cst.Call, name: str, keyword: cst.Name, value: cst.BaseExpression) -> cst.Call:
    """Replace the keyword and the value of an argument."""
    new = by_name(call)[name].with_changes(keyword=keyword, value=value)
    return call.with_changes(args=[new if arg.keyword and arg.keyword.value == name else arg for arg in call.args])


def class_of(name: str) -> Any:
    """Return the config or trainer of this package for a name in TRL. Return None for other names."""
    row = imports().get(name)
    if row is not None and row.action == "rename" and row.replacement.startswith("posttrain."):
        name = row.replacement.rpartition(".")[2]
    if name in posttrain.__all__ and name.endswith(("Config", "Trainer", "Arguments")):
        kind = pkgutil.resolve_name(f"posttrain.{name}")
        return kind if is_dataclass(kind) or "config_class" in dir(kind) else None
    return None


def place_of(name: str, module: str, *, moves: bool = True) -> tuple[str, str]:
    """Return the module and the new name for a name of TRL. With ``moves``, the module of public names is ``posttrain``."""
    row = imports().get(name)
    if row is not None and row.action == "rename":
        path, _, new = row.replacement.rpartition(".")
        return path, new
    if moves and name in posttrain.__all__ and f"{module}.{name}" not in BY_MODULE:
        return "posttrain", name
    return module, name


def given_config(kind: type, call: cst.Call) -> cst.BaseExpression | None:
    """Return the config that is passed to a trainer by keyword or by position. Return None if no config is passed."""
    place = list(inspect.signature(kind.__init__).parameters).index("args") - 1
    plain = [arg.value for arg in call.args if not arg.keyword and not arg.star]
    by_name = [arg.value for arg in call.args if arg.keyword and arg.keyword.value in ("args", "config")]
    return next(iter([*by_name, *plain[place : place + 1]]), None)


def row_of(kind: Any, name: str, value: object = ANY) -> TRLName | None:
    """Return the row of an argument in the table of names. If a trainer's argument has no row, use the row of the config option
    of this name, if the option is refused or ignored.
    """
    row = old_names.row_of(kind, name, value)
    if row is None and not is_dataclass(kind) and old_names.unknown_arguments(kind, [name]):
        row = old_names.row_of(kind.config_class, name, value)
        return row if row is not None and row.action in ("refuse", "ignore") else None
    return row


def keys_of(node: cst.BaseExpression) -> list[str] | None:
    """Return the keys of a dict literal or of a call of ``dict``. Return None for other expressions."""
    if isinstance(node, cst.Call) and code(node.func) == "dict" and all(arg.keyword for arg in node.args):
        return list(by_name(node))
    if isinstance(node, cst.Dict) and all(isinstance(item, cst.DictElement) for item in node.elements):
        keys = [value_of(item.key) for item in node.elements if isinstance(item, cst.DictElement)]
        return keys if all(isinstance(key, str) for key in keys) else None
    return None


def without_vllm(call: cst.Call) -> bool:
    """Return whether a config is created without vLLM. The vLLM options of such a config have no effect."""
    args = by_name(call)
    return not any(arg.star for arg in call.args) and (
        "use_vllm" not in args or value_of(args["use_vllm"].value) is False
    )


def options_of(config: type) -> set[str]:
    """Return the names of all options of a config class."""
    return {item.name for item in fields(config)}


def is_option(kind: type, name: str, value: object) -> bool:
    """Return whether an argument of a trainer is now an option of the trainer's config."""
    if not old_names.unknown_arguments(kind, [name]) or old_names.row_of(kind, name):
        return False
    config = kind.config_class
    return name in options_of(config) or old_names.is_accepted(config, name, value)


def value_of(node: cst.BaseExpression) -> Any:
    """Return the value of a literal, or `ANY` for other expressions."""
    try:
        return ast.literal_eval(code(node))
    except (ValueError, SyntaxError):
        return ANY


def names_in(node: cst.CSTNode) -> list[str]:
    """Return all names that occur in an expression."""
    names = [node.value] if isinstance(node, cst.Name) else []
    return names + [name for child in node.children for name in names_in(child)]


def dotted(path: str) -> Any:
    """Return the syntax tree of a dotted name."""
    return cst.parse_expression(path)


def renamed_package(node: cst.BaseExpression) -> Any:
    """Replace ``trl`` at the start of a dotted name by ``posttrain``."""
    name = get_full_name_for_node(node) or ""
    first, dot, rest = name.partition(".")
    return dotted(f"posttrain{dot}{rest}") if first == "trl" else node


def joined(
    names: Sequence[cst.ImportAlias], last: cst.Comma | cst.MaybeSentinel, *, one_line: bool
) -> list[cst.ImportAlias]:
    """Separate imported names with commas. ``last`` is the comma or the end after the last name."""
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    result = [
        alias.with_changes(comma=comma) if one_line or isinstance(alias.comma, cst.MaybeSentinel) else alias
        for alias in names[:-1]
    ]
    return [*result, names[-1].with_changes(comma=last)]


def equal_sign(call: cst.Call) -> cst.AssignEqual:
    """Return the equal sign, with its spaces, of a call's first keyword argument."""
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return next((arg.equal for arg in call.args if isinstance(arg.equal, cst.AssignEqual)), plain)


def with_argument(call: cst.Call, arg: cst.Arg) -> cst.Call:
    """Append an argument to a call. The new argument gets its own line if all other arguments have their own lines."""
    if not call.args:
        return call.with_changes(args=[cst.Arg(arg.value, arg.keyword, equal=equal_sign(call))])
    *before, last = call.args
    between: Any = call.whitespace_before_args
    if before and isinstance(before[-1].comma, cst.Comma):
        between = before[-1].comma.whitespace_after
    if isinstance(between, cst.ParenthesizedWhitespace):
        between = cst.ParenthesizedWhitespace(indent=between.indent, last_line=between.last_line)
    elif not isinstance(between, cst.SimpleWhitespace) or not between.value:
        between = cst.SimpleWhitespace(" ")
    end: Any = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else None
    if isinstance(end, cst.ParenthesizedWhitespace):  # Keep the comment after the last argument on its line.
        inner = end.last_line if not isinstance(between, cst.ParenthesizedWhitespace) else between.last_line
        first = cst.Comma(
            whitespace_after=end.with_changes(last_line=inner, indent=getattr(between, "indent", end.indent))
        )
        new = cst.Comma(whitespace_after=cst.ParenthesizedWhitespace(indent=end.indent, last_line=end.last_line))
    else:
        first, new = cst.Comma(whitespace_after=between), last.comma
    added = cst.Arg(
        arg.value, arg.keyword, equal=equal_sign(call), comma=new, whitespace_after_arg=last.whitespace_after_arg
    )
    last = last.with_changes(comma=first, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*before, last, added])


def without(call: cst.Call, name: str) -> cst.Call:
    """Remove an argument from a call. Comments on their own lines after the argument are kept."""
    args = list(call.args)
    at, arg = next((at, arg) for at, arg in enumerate(args) if arg.keyword and arg.keyword.value == name)
    after: Any = arg.comma.whitespace_after if isinstance(arg.comma, cst.Comma) else None
    comments = commented(after.empty_lines) if isinstance(after, cst.ParenthesizedWhitespace) else []
    if at and at == len(args) - 1:
        args[at - 1] = last_argument(args[at - 1], arg)
    elif at and comments and isinstance(previous := args[at - 1].comma, cst.Comma):
        space: Any = previous.whitespace_after
        if isinstance(space, cst.ParenthesizedWhitespace):
            space = space.with_changes(empty_lines=[*space.empty_lines, *comments])
            args[at - 1] = args[at - 1].with_changes(comma=previous.with_changes(whitespace_after=space))
    del args[at]
    return call.with_changes(args=args)


def with_defaults(call: cst.Call, config: type) -> cst.Call:
    """Add the default values of ``TrainingArguments`` as arguments, where the defaults of ``config`` differ."""
    own = {item.name: item.default for item in fields(config)}
    args = by_name(call)
    for item in fields(TrainingArguments):
        if item.default != own[item.name] and isinstance(item.default, int | float) and item.name not in args:
            call = with_argument(call, cst.Arg(cst.parse_expression(repr(item.default)), cst.Name(item.name)))
    return call


def last_argument(arg: cst.Arg, removed: cst.Arg) -> cst.Arg:
    """Format an argument as the last argument of a call, after the last argument was removed. The argument keeps its
    comment and gets the line end of the removed argument.
    """
    comma: Any = arg.comma
    space = comma.whitespace_after
    trailing = isinstance(removed.comma, cst.Comma)
    end: Any = removed.comma.whitespace_after if trailing else removed.whitespace_after_arg
    if isinstance(space, cst.ParenthesizedWhitespace) and isinstance(end, cst.ParenthesizedWhitespace):
        lines = [*commented(space.empty_lines), *commented(end.empty_lines)]
        end = space.with_changes(empty_lines=lines, indent=end.indent, last_line=end.last_line)
    if trailing:
        return arg.with_changes(comma=comma.with_changes(whitespace_after=end))
    return arg.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=end)


def commented(lines: Iterable[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Return the lines that contain a comment."""
    return [line for line in lines if line.comment is not None]
