"""The shape of the house: who may import whom, what an import costs, and what must not be in it."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from rooftrace._face import names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rooftrace"
# Imports run to the left, only.
LAYERS = (
    "hardware",
    "graph",
    "tracer",
    "scripts",
    "costmodels",
    "studies",
    "measured",
    "diffs",
    "weights",
    "reporting",
)
MOST_ROOMS = 8
"""Rooms of a package: a person draws six to eight boxes."""
MOST_ARROWS = 122
"""Pairs of rooms of one package of which one imports the other, in all packages together."""
MOST_FILES = 456
MOST_FOLDERS = 60
FACE = "the public face"  # rooftrace/__init__.py: stands above every layer
# What every layer may use: they know of no layer.
FILES_BELOW = (
    "rooftrace._amounts",  # numbers at one point, or arrays over many
    "rooftrace._escapes",  # how text from outside is written
    "rooftrace._extensions",  # what users and third-party packages add
    "rooftrace._face",  # how a package gives its names
    "rooftrace._processes",  # other Pythons that are started
    "rooftrace._progress",  # what is told while something runs
    "rooftrace._shown",  # how a result shows itself
    "rooftrace._formats",  # the formats that a result is written in
    "rooftrace._outputs",  # what an output may replace
    "rooftrace._plain",  # records as JSON
    "rooftrace._reading",  # bounded reading of files into records
    "rooftrace._writing",  # files and folders that are whole or not there
    "rooftrace.errors",  # errors of a request, and hints
)
BELOW = "below every layer"
# The command line stands above the public face: it calls what users call.
CLI = "rooftrace.reporting.cli"

# Which layers, or rooms of a layer, may import a library at all.
LIBRARIES = {
    "torch": {
        "tracer",
        "scripts",
        "studies.breaks",
        "measured.bench",
        "measured.live",
        "weights",
    },
    "transformers": {"tracer", "scripts", "measured.live", "measured.bench"},
    "fvcore": {"tracer"},
    "onnx": {"tracer"},
    "gguf": {"tracer.targets"},
    "regex": {"tracer.targets"},
    "rich": {"reporting"},
    "click": {"reporting"},
    "matplotlib": {"reporting"},
    "pandas": {"costmodels", "studies", "measured", "diffs", "reporting"},
    "numpy": {
        "graph",
        "tracer",
        "costmodels",
        "studies",
        "measured",
        "diffs",
        "weights",
        "reporting",
    },
    "scipy": {"graph", "tracer", "costmodels", "studies", "measured.fit"},
    "ijson": {"measured.profiles"},
    "rapidfuzz": {"measured.alignment"},
    "tomli": set(),  # of files: rooftrace._reading
    "cloudpickle": {"reporting.commands"},
    "dask": {"reporting.commands"},
    "distributed": {"reporting.commands"},
    "pyarrow": {"reporting.commands"},
    "msgspec": set(LAYERS) - {"hardware"},
    "PIL": {"reporting"},
    "pytest": {"reporting.gates"},  # its plugin, which only pytest loads
}
PROJECTS = {"PIL": "pillow"}
"""Under which name a library is installed, where that is another."""
SLOW_TO_LOAD = {
    "transformers",
    "fvcore",
    "onnx",
    "gguf",
    "regex",
    "matplotlib",
    "pandas",
    "scipy",
    "ijson",
    "rapidfuzz",
    "PIL",
    "cloudpickle",
    "dask",
    "distributed",
    "pyarrow",
}

# Imports against the direction, each with its reason. One that is gone must go from here too.
AGAINST_THE_DIRECTION = {
    **{
        (
            "rooftrace.tracer.phases.tracing",
            f"rooftrace.scripts.steps.{name}",
        ): "a target may be a script"
        for name in ("ScriptError", "ScriptRequest")
    },
    ("rooftrace._shown", "rooftrace.reporting.views.shown"): "print(estimate) is reporting's table",
    **{
        (
            "rooftrace.costmodels.estimates.estimates",
            f"rooftrace.studies.advice.{name}",
        ): "estimate.headroom() is README's; advice prices by estimates"
        for name in ("headroom", "Headroom")
    },
    (
        "rooftrace.measured.fit.validation",
        "rooftrace.reporting.commands.reportfolder.write_validation",
    ): "validation.write(folder) is README's; reporting makes and writes the files",
    **{
        (
            f"rooftrace.{file}",
            f"rooftrace.reporting.figures.{name}",
        ): "result.plot(path) is a figure"
        for file, name in (
            ("studies.sweeps.sweeps", "draw_sweep"),
            ("studies.solving.serving", "draw_answer"),
            ("studies.solving.meshes", "draw_answer"),
            ("reporting.commands.rooflinesteps", "roofline"),
        )
    },
}


@dataclass(frozen=True)
class Import:
    """One import statement's one name: `module` at `line` of `importer` reads `target`."""

    importer: str  # "rooftrace.tracer.recording.recorder"
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
    """The layer of "rooftrace.graph.graph"; FACE for the root package and its names."""
    if module.startswith(FILES_BELOW):
        return BELOW
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
        ("from .names import Op", [("rooftrace.tracer.names.Op", False)]),
        ("from ..hardware import Chip", [("rooftrace.hardware.Chip", False)]),
        ("from .. import reporting", [("rooftrace.reporting", False)]),
        ("def f():\n    import torch", [("torch", True)]),
        ("class A:\n    import torch", [("torch", False)]),
        ("try:\n    import torch\nexcept ImportError: ...", [("torch", False)]),
        ("if TYPE_CHECKING:\n    import torch", [("torch", True)]),
        ("if TYPE_CHECKING: ...\nelse:\n    import torch", [("torch", False)]),
        ("importlib.import_module('torch')", [("torch", False)]),
        ("importlib.import_module('.names')", [("rooftrace.tracer.names", False)]),
    ],
)
def test_the_reader_of_imports_sees(source: str, expected: list[tuple[str, bool]]) -> None:
    found = imports_of(source, "rooftrace.tracer.api", is_package=False)
    assert [(one.target, one.deferred) for one in found] == expected


def test_imports_run_one_way() -> None:
    order = [BELOW, *LAYERS, FACE]
    bad = [
        one
        for one in all_imports()
        if one.library == "rooftrace"
        and not one.importer.startswith(CLI)
        and order.index(layer_of(one.target)) > order.index(layer_of(one.importer))
        and (one.importer, one.target) not in AGAINST_THE_DIRECTION
    ]
    assert not bad, listed(bad)


# --- rooms: the folders inside a layer, and their faces ---------------------------------------


def room_of(path: Path) -> str:
    """The package that a file stands in: "rooftrace.tracer.values"."""
    return ".".join(path.parent.relative_to(ROOT).parts)


@cache
def faces() -> dict[str, dict[str, str]]:
    """{room: {public name: the module that has it}} by the stubs beside each `__init__.py`."""
    return {
        room_of(stub): {
            name: module
            for name, (module, _) in names(room_of(stub), stub.read_text(encoding="utf-8")).items()
        }
        for stub in sorted(PACKAGE.rglob("__init__.pyi"))
    }


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sources()}


def file_of(target: str) -> str | None:
    """The module that an import of `target` reads, faces looked through; None: not ours."""
    while target:
        if target in modules():
            return target
        package, _, name = target.rpartition(".")
        if package in faces() and name in faces()[package]:
            return file_of(f"{faces()[package][name]}.{name}")
        target = package
    return None


def test_no_room_imports_past_the_face_of_another() -> None:
    bad = []
    for one in all_imports():
        read = file_of(one.target) if one.library == "rooftrace" else None
        if read is None or layer_of(read) == BELOW or one.importer == "rooftrace.__main__":
            continue
        if (one.importer, one.target) in AGAINST_THE_DIRECTION:
            continue
        here, there = room_of(modules()[one.importer]), room_of(modules()[read])
        if here != there and one.target != there and not is_public(one.target):
            bad.append(one)
    assert not bad, listed(bad)


def is_public(target: str) -> bool:
    """Whether a face gives this name, or the whole file that has it (`hardware.units`)."""
    package, _, name = target.rpartition(".")
    room, _, file = package.rpartition(".")
    return name in faces().get(package, {}) or faces().get(room, {}).get(file) == package


def test_a_face_never_gives_a_name_that_is_also_a_file_beside_it() -> None:
    for room in faces():
        folder = ROOT / room.replace(".", "/")
        beside = {path.stem for path in folder.iterdir()}
        given = names(room, (folder / "__init__.pyi").read_text(encoding="utf-8"))
        inside_of_files = {name for name, (_, inside) in given.items() if inside is not None}
        assert not inside_of_files & beside, f"{room}: importing the file would hide the name"


def test_every_name_of_a_face_is_there() -> None:
    for room, given in faces().items():
        for name, module in given.items():
            read = file_of(f"{module}.{name}")
            assert read is not None, f"{room}.{name}: no module {module}"
            source = modules()[read].read_text(encoding="utf-8")
            assert read.endswith(f".{name}") or name in source, f"{room}.{name}"


def test_the_tree_in_contributing_shows_every_room() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.partition("```diagram\nrooftrace/\n")[2].partition("```")[0]
    shown: set[str] = set()
    above: list[str] = []
    for line in tree.splitlines():
        name, indent = line.split("/")[0].strip(), len(line) - len(line.lstrip())
        above = [*above[: indent // 2 - 1], name]
        shown.add(".".join(("rooftrace", *above)))
    rooms = {room_of(path) for path in sources()} - {"rooftrace"}
    assert shown - {"rooftrace.hardware.chips"} == rooms


def test_a_face_is_small_beside_what_stands_behind_it() -> None:
    lines: Counter[str] = Counter()
    for path in sources():
        lines[room_of(path)] += len(path.read_text(encoding="utf-8").splitlines())
    wide = {
        room: len(given)
        for room, given in faces().items()
        if len(given) > max(6, lines[room] / 50) and room.count(".") > 1
    }
    assert not wide


def test_a_package_can_be_drawn() -> None:
    rooms = {room_of(path) for path in sources()} - {"rooftrace"}
    packages = {room.split(".")[1] for room in rooms}
    assert packages == set(LAYERS)
    inside = Counter(room.split(".")[1] for room in rooms if room.count(".") == 2)
    assert max(inside.values()) <= MOST_ROOMS, inside
    arrows = set()
    for one in all_imports():
        read = file_of(one.target) if one.library == "rooftrace" else None
        if read is not None:
            here, there = room_of(modules()[one.importer]), room_of(modules()[read])
            if here != there and here.split(".")[1:2] == there.split(".")[1:2]:
                arrows.add((here, there))
    assert len(arrows) <= MOST_ARROWS, len(arrows)
    assert len(sources()) <= MOST_FILES
    assert len(rooms) <= MOST_FOLDERS


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of more than one node that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    result: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                result.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(arrows):
        if node not in index:
            visit(node)
    return result


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_circle_of_files() -> None:
    arrows: dict[str, set[str]] = {}
    for one in all_imports():
        read = file_of(one.target) if one.library == "rooftrace" else None
        stated = (one.importer, one.target) in AGAINST_THE_DIRECTION
        if read is not None and read != one.importer and not stated:
            arrows.setdefault(one.importer, set()).add(read)
    assert not circles(arrows)


def lengths() -> Iterator[tuple[str, int, int]]:
    """(what, its lines, how many it may have) of each file, class and function."""
    for path in sources():
        text = path.read_text(encoding="utf-8")
        yield module_name(path), len(text.splitlines()), 600
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                limit = 250 if isinstance(node, ast.ClassDef) else 60
                yield f"{module_name(path)}:{node.name}", lines, limit


def test_files_classes_and_functions_can_be_held_in_the_head() -> None:
    assert not {what: lines for what, lines, limit in lengths() if lines > limit}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(file, class) of every class that stands at the top of a file."""
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                yield module_name(path), node


# Calls of a record with seven or more positional arguments that are left, by layer: never more.


@pytest.mark.slow
def test_a_record_of_many_fields_is_made_by_keyword() -> None:
    records = {
        node.name
        for _, node in classes()
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    calls: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and len(node.args) >= 7:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                name = node.func.id if isinstance(node.func, ast.Name) else name
                if name in records:
                    place = f"{module_name(path)}:{node.lineno} {name}"
                    calls.setdefault(layer_of(module_name(path)), []).append(place)
    assert not calls


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for module, node in classes():
        places.setdefault(node.name, []).append(module)
    shared = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not shared


def test_every_private_method_is_called() -> None:
    """A method that overrides one which its base class no longer calls is dead, and unseen."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    words = Counter(re.findall(r"\w+", text))
    made = Counter(re.findall(r"def (_[a-z]\w*)", text))
    methods = {
        method.name
        for _, node in classes()
        for method in getattr(node, "body", ())
        if isinstance(method, ast.FunctionDef) and re.match(r"_[a-z]", method.name)
    }
    dead = {name for name in methods if words[name] == made[name]}
    of_torch = {"_get_ddp_logging_data", "_rebuild_buckets", "_should_skip_dynamo"}
    assert dead == of_torch | {"_render_traceback_"}  # which IPython calls


def test_every_exception_to_the_direction_is_used_and_deferred() -> None:
    deferred = {(one.importer, one.target) for one in all_imports()}
    assert set(AGAINST_THE_DIRECTION) <= deferred


def stands_in(module: str, places: set[str]) -> bool:
    """Whether a module is of one of these layers or rooms ("measured.bench"), or below all."""
    return layer_of(module) == BELOW or any(
        f"{module}.".startswith(f"rooftrace.{place}.") for place in places
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    allowed = LIBRARIES[library]
    bad = [
        one
        for one in all_imports()
        if one.library == library and not stands_in(one.importer, allowed)
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
    lines += [*extras["fleet"], *extras["test"]]
    declared = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines}
    wanted = {PROJECTS.get(library, library) for library in foreign}
    assert wanted <= declared, "say in pyproject.toml that it is needed"


def test_every_folder_is_a_package_and_every_module_says_what_it_knows() -> None:
    missing = {path.parent for path in sources() if not (path.parent / "__init__.py").exists()}
    assert not missing, "a folder without __init__.py is left out of the wheel"
    silent = [
        module_name(path)
        for path in sources()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not silent, "modules without a docstring"


def files_of_git(*options: str) -> list[str]:
    """Paths of the checkout that git tracks, and what more `git ls-files` lists by options."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listing.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.mark.parametrize("name", ["hardware", "tracer", "costmodels", "reporting"])
def test_a_link_at_the_root_shows_the_layer(name: str) -> None:
    assert (ROOT / name).is_symlink()
    assert os.readlink(ROOT / name) == f"rooftrace/{name}"


AT_THE_ROOT = {
    *("rooftrace", "tests", "docs", "examples", "benchmarks", "site"),
    *("hardware", "tracer", "costmodels", "reporting"),  # links
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("Makefile", "MANIFEST.in", "pyproject.toml", "constraints.txt"),
}


@pytest.mark.subprocess
def test_the_root_holds_what_a_newcomer_looks_for() -> None:
    tops = {name.split("/")[0] for name in files_of_git()}
    assert {top for top in tops if not top.startswith(".")} == AT_THE_ROOT


WITHOUT_TORCH = """
import pkgutil, sys

import rooftrace

loaded = {"torch", "transformers", "pandas", "matplotlib", "rich", "numpy"} & set(sys.modules)
assert not loaded, f"import rooftrace loads {sorted(loaded)}"

import contextlib, io

from rooftrace.reporting.cli import main

said = io.StringIO()
with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
    main(["report", "--help"])
assert "TARGET" in said.getvalue()
loaded = {"torch", "transformers", "pandas", "matplotlib", "rich", "numpy"} & set(sys.modules)
assert not loaded, f"help loads {sorted(loaded)}"

import rooftrace.reporting.commands.reportfolder, rooftrace.reporting.views.results
import rooftrace.reporting.figures.roofline, rooftrace.reporting.sections.report_json
import rooftrace.reporting.commands.reportfolder

loaded = {"torch", "transformers", "pandas", "matplotlib", "rich", "numpy"} & set(sys.modules)
assert not loaded, f"importing the report loads {sorted(loaded)}"

sys.modules["torch"] = sys.modules["transformers"] = None  # from here on, importing it raises
assert issubclass(rooftrace.types.TraceError, RuntimeError), "a sweep of cached traces names it"
rooms = ("measured.profiles", "measured.alignment", "measured.fit", "studies.sweeps")
rooms += ("studies.solving", "studies.explaining", "studies.advice", "studies.sensitivity")
for name in ("hardware", "graph", "costmodels", "diffs", *rooms, "reporting"):
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
    bad = []
    for name in files_of_git("--others", "--exclude-standard"):
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
