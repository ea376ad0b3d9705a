"""The shape of the house: who may import whom, what an import costs, and what must not be in it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rooftrace"
LAYERS = ("hardware", "tracer", "costmodels", "reporting")  # imports run to the left, only
FACE = "the public face"  # rooftrace/__init__.py: stands above every layer

# Which layers may import a library at all, and which of those only inside a function.
LIBRARIES = {
    "torch": {"tracer"},
    "transformers": {"tracer"},
    "fvcore": {"tracer"},
    "rich": {"reporting"},
    "click": {"reporting"},
    "jinja2": {"reporting"},
    "matplotlib": {"reporting"},
    "pandas": {"costmodels", "reporting"},
    "numpy": {"tracer", "costmodels", "reporting"},
    "scipy": {"tracer", "costmodels"},
    "ijson": {"costmodels"},
    "rapidfuzz": {"costmodels"},
    "tomli": {"hardware", "tracer", "costmodels", "reporting"},
}
SLOW_TO_LOAD = {"transformers", "fvcore", "matplotlib", "pandas", "scipy", "ijson", "rapidfuzz"}

# Imports against the direction, each with its reason. One that is gone must go from here too.
AGAINST_THE_DIRECTION = {
    ("rooftrace.costmodels.estimate", "rooftrace._render"): "print(estimate) is reporting's table",
}


@dataclass(frozen=True)
class Import:
    """One import statement's one name: `module` at `line` of `importer` reads `target`."""

    importer: str  # "rooftrace.tracer.capture"
    line: int
    target: str  # "rooftrace.hardware.chip.Chip", "torch.fx"
    deferred: bool  # inside a function, or only for the type checker

    @property
    def library(self) -> str:
        return self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str:
    """The layer that "rooftrace.tracer.graph" is in; FACE for the root package and its names."""
    second = [*module.split("."), ""][1]
    return second if second in LAYERS else FACE


def targets(node: ast.AST, package: str) -> Iterator[str]:
    """The absolute dotted names that one statement or call imports, relative ones resolved."""
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package.split(".")[: len(package.split(".")) - (level - 1)] if level else []
            prefix = ".".join([*base, *([module] if module else [])])
            yield from (f"{prefix}.{name.name}" for name in names)
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            base = package if name.startswith(".") else ""
            yield base + name


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports_of(source: str, importer: str, *, is_package: bool) -> list[Import]:
    package = importer if is_package else importer.rpartition(".")[0]
    found = []

    def visit(node: ast.AST, deferred: bool) -> None:
        for target in targets(node, package):
            found.append(Import(importer, getattr(node, "lineno", 0), target, deferred))
        for child in ast.iter_child_nodes(node):
            # The else of `if TYPE_CHECKING:` runs when the module loads.
            for_checker = is_type_checking(node) and child in node.body
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, deferred or for_checker or in_function)

    visit(ast.parse(source), False)
    return found


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def all_imports() -> tuple[Import, ...]:
    return tuple(
        found
        for path in sources()
        for found in imports_of(
            path.read_text(encoding="utf-8"),
            module_name(path),
            is_package=path.name == "__init__.py",
        )
    )


def listed(bad: list[Import]) -> str:
    return "\n" + "\n".join(map(str, bad))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.fx", [("torch.fx", False)]),
        ("from torch import nn, fx", [("torch.nn", False), ("torch.fx", False)]),
        ("from .graph import Op", [("rooftrace.tracer.graph.Op", False)]),
        ("from ..hardware import Chip", [("rooftrace.hardware.Chip", False)]),
        ("from .. import reporting", [("rooftrace.reporting", False)]),
        ("def f():\n    import torch", [("torch", True)]),
        ("class A:\n    import torch", [("torch", False)]),
        ("try:\n    import torch\nexcept ImportError: ...", [("torch", False)]),
        ("if TYPE_CHECKING:\n    import torch", [("torch", True)]),
        ("if TYPE_CHECKING: ...\nelse:\n    import torch", [("torch", False)]),
        ("importlib.import_module('torch')", [("torch", False)]),
        ("importlib.import_module('.graph')", [("rooftrace.tracer.graph", False)]),
    ],
)
def test_the_reader_of_imports_sees(source: str, expected: list[tuple[str, bool]]) -> None:
    found = imports_of(source, "rooftrace.tracer.capture", is_package=False)
    assert [(one.target, one.deferred) for one in found] == expected


def test_imports_run_one_way() -> None:
    order = [*LAYERS, FACE]
    bad = [
        one
        for one in all_imports()
        if one.library == "rooftrace"
        and order.index(layer_of(one.target)) > order.index(layer_of(one.importer))
        and (one.importer, one.target) not in AGAINST_THE_DIRECTION
    ]
    assert not bad, listed(bad)


def test_every_exception_to_the_direction_is_used_and_deferred() -> None:
    deferred = {(one.importer, one.target) for one in all_imports() if one.deferred}
    assert set(AGAINST_THE_DIRECTION) <= deferred


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    allowed = LIBRARIES[library]
    bad = [
        one
        for one in all_imports()
        if one.library == library and layer_of(one.importer) not in allowed
    ]
    assert not bad, f"{library} belongs in {', '.join(sorted(allowed))}:{listed(bad)}"


def test_libraries_slow_to_load_are_imported_where_they_are_used() -> None:
    bad = [one for one in all_imports() if one.library in SLOW_TO_LOAD and not one.deferred]
    assert not bad, listed(bad)


def test_every_library_is_known_and_declared() -> None:
    standard = {*sys.stdlib_module_names, "tomllib"}  # since Python 3.11; tomli stands in before
    foreign = {one.library for one in all_imports()} - standard - {"rooftrace"}
    assert foreign <= set(LIBRARIES), "say in LIBRARIES which layers may import it"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["hf"], *extras["compare"]]
    declared = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines}
    assert foreign <= declared, "say in pyproject.toml that it is needed"


def test_every_folder_is_a_package_and_every_module_says_what_it_knows() -> None:
    missing = {path.parent for path in sources() if not (path.parent / "__init__.py").exists()}
    assert not missing, "a folder without __init__.py is left out of the wheel"
    silent = [
        module_name(path)
        for path in sources()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, "modules without a docstring"


@pytest.mark.parametrize("name", LAYERS)
def test_a_link_at_the_root_shows_the_layer(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert os.readlink(ROOT / name) == f"rooftrace/{name}"


WITHOUT_TORCH = """
import pkgutil, sys

import rooftrace

loaded = {"torch", "transformers", "pandas", "matplotlib", "rich", "numpy"} & set(sys.modules)
assert not loaded, f"import rooftrace loads {sorted(loaded)}"

sys.modules["torch"] = sys.modules["transformers"] = None  # from here on, importing it raises
for name in ("hardware", "costmodels", "reporting"):
    package = __import__(f"rooftrace.{name}", fromlist=["*"])
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
loaded = {"pandas", "matplotlib", "scipy"} & set(sys.modules)
assert not loaded, f"the layers without torch load {sorted(loaded)} before they are used"
"""


@pytest.mark.subprocess
def test_only_tracing_needs_torch_and_the_package_alone_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# A path from the root of somebody's machine, and a package registry: both are the reader's own.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.:~/-])/(?:root|home|work|mnt|Users)/[\w.]"
    r"|--(?:extra-)?index-url|--find-link[s]|\b(?:pypi|pythonhosted|download\.pytorch)\.org\b"
)


@pytest.mark.subprocess
def test_no_file_names_a_path_or_a_registry_of_one_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    bad = []
    for name in filter(None, listing.stdout.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        bad += [
            f"{name}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), start=1)
            if OF_ONE_MACHINE.search(line)
        ]
    assert not bad, "\n" + "\n".join(bad)
