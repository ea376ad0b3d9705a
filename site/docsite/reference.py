"""A page for each public name of `import rooftrace`, by the work that a reader has."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftrace import _face

ROOT = Path(__file__).resolve().parents[2]
STUBS = {"": "__init__.pyi", "extend.": "extend.pyi", "tools.": "tools.pyi", "types.": "types.pyi"}
"""The stub of each public module, by how the names of that module begin after `rooftrace.`."""

GROUPS: Mapping[str, str] = {
    "Trace": "trace trace_target Request OpGraph save load capture Captured telling",
    "Price": """estimate priced_graphs Estimate Breakdown plan Plan execution_model ExecutionModel
        reprice memory Memory load_chip available_chips Chip
        Host""",
    "Run a script": "run ScriptCost TurnCost",
    "Report": """report Report reports Reports save_timeline largest_batch LargestBatch summary
        Summary profile Profile flop_count_table units""",
    "What would help": """guidance Guidance WhatIf graph_breaks GraphBreaks headroom Headroom Saving
        explain Explanation""",
    "Compare": """diff Diff compare Comparison inventory ModelInfo ParameterDiff CheckpointDiff
        dump_model_info""",
    "Many chips": """fake_mesh System best_mesh MeshAnswer scaling ScalingAnswer
        training_run TrainingRun save_chakra""",
    "What if": """form Form sweep Sweep sweep_fleet SweepFleet solve
        ServingAnswer CapacityAnswer RatesAnswer PassingAnswer sensitivity Elasticities
        explore Exploration roofline Rooflines""",
    "Measure and calibrate": """measure measuring live trainer_callback lightning_callback fused
        FusedStep Run calibrate Calibration Knobs validate Validation RunDiff""",
    "Extend": """rule OpView Cost Work Access fusion KernelView section Section Table Column Note
        source phase""",
    "Errors": """RequestError TargetError TraceError UnknownChipError MissingPeakError
        ExecutionError GraphFileError ProfileError KnobsError""",
}


@dataclass(frozen=True)
class PublicName:
    """A name that users call: rooftrace.PATH, and the place of its definition."""

    path: str  # "trace", "extend.rule"
    module: str
    inside: str | None  # the name in that module; None: the module itself


def public_names() -> dict[str, PublicName]:
    """{name: where it is}, by the stubs of the public modules, which share no name."""
    return {
        name: PublicName(f"{start}{name}", module, inside)
        for start, stub in STUBS.items()
        for name, (module, inside) in _face.names(
            "rooftrace", (ROOT / "rooftrace" / stub).read_text(encoding="utf-8")
        ).items()
        if f"{name}." not in STUBS
    }


def grouped() -> dict[str, list[str]]:
    """The names of each group, in the order in which they are read."""
    return {title: names.split() for title, names in GROUPS.items()}


def page_of(name: str) -> str:
    """The page of a name: classes apart, so that `Plan` and `plan` are two files everywhere."""
    folder = "classes" if name[0].isupper() else "functions"
    return f"reference/{folder}/{name}.md"


def page(name: str) -> str:
    """The Markdown of a name's page: what mkdocstrings reads in the source."""
    return f"---\ntitle: {name}\n---\n\n::: rooftrace.{public_names()[name].path}\n"


def index() -> str:
    """The page that lists all names, each with the first sentence of its docstring."""
    parts = [
        "# Python names",
        "All that `import rooftrace as rt` gives, and what each is for. `rt.__version__` is the "
        "version. Names that begin with `extend.`, `tools.` or `types.` stand in these modules.",
    ]
    for title, names in grouped().items():
        parts.append(f"## {title}")
        rows = [
            f"| [`{public_names()[name].path}`]({page_of(name)[10:]}) | {first_sentence(name)} |"
            for name in names
        ]
        parts.append("\n".join(["| Name | What it is |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def first_sentence(name: str) -> str:
    """The first line of a docstring, read without importing anything."""
    public = public_names()[name]
    text = docstring(public.module, public.inside)
    if text is None:
        raise ValueError(f"rooftrace.{public.path} has no docstring: {public.module}")
    line = " ".join(text.partition("\n\n")[0].split())
    return line.replace("|", r"\|").replace("<", "&lt;")


Definition = ast.Module | ast.ClassDef | ast.FunctionDef


def definition(module: str, name: str | None) -> Definition:
    """Where a name of a module is defined, looked for where faces say that it stands."""
    path = ROOT.joinpath(*module.split("."))
    if path.is_dir():
        face = (path / "__init__.pyi").read_text(encoding="utf-8")
        return definition(*_face.names(module, face)[name or ""])
    for suffix in (".py", ".pyi"):  # a stub where the module has no `def` of it
        source = path.with_suffix(suffix)
        tree = ast.parse(source.read_text(encoding="utf-8") if source.is_file() else "")
        if name is None:
            return tree
        for node in reversed(tree.body):  # the last `def`: those before it are overloads
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
    raise ValueError(f"{module} has no function and no class {name}")


def docstring(module: str, name: str | None) -> str | None:
    """The docstring of a name of a module, read without importing anything."""
    return ast.get_docstring(definition(module, name))


def types_of(module: str, name: str | None) -> list[str]:
    """The types that a page must show: of arguments and result, of fields and properties."""
    node = definition(module, name)
    nodes = node.body if isinstance(node, ast.ClassDef) else [node]
    types: list[ast.expr | None] = []
    for each in nodes:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            arguments = [inner for inner in ast.walk(each.args) if isinstance(inner, ast.arg)]
            types += [each.returns, *(argument.annotation for argument in arguments)]
        elif isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            types.append(each.annotation)
    return [ast.unparse(each) for each in types if each is not None]


def navigation() -> list[Any]:
    """The entries of the navigation."""
    nav: list[Any] = ["reference/index.md"]
    nav += [
        {title: [{name: page_of(name)} for name in names]} for title, names in grouped().items()
    ]
    return nav
