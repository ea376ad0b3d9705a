"""Private names of torch: one table has all of them, and what torch lacks is said once."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rooftrace.errors import RequestError
from rooftrace.tracer import torch_private

PACKAGE = Path(__file__).resolve().parents[2] / "rooftrace"
TABLE = Path(torch_private.__file__)
PATH = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
TEXTS = {
    "torch.cuda._sleep": "the call of a user that a message names",
    "torch.cuda.memory._get_current_allocator": "the call of a user that a message names",
    "torch.cuda.memory._host_allocator": "the call of a user that a message names",
    "torch.cuda.memory._record_memory_history": "the call of a user that a message names",
    "torch._utils": "how the names of modules begin that keep answers",
    "torch.utils._triton": "how the names of modules begin that keep answers",
}
"""Strings that look like private names and are none that rooftrace looks up."""


def private_paths(tree: ast.Module) -> Iterator[str]:
    """Dotted paths through torch with a private part: imports, attributes and whole strings."""
    names: dict[str, str] = {}

    def path_of(node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Attribute):
            home = path_of(node.value)
            return home and f"{home}.{node.attr}"
        return names.get(node.id) if isinstance(node, ast.Name) else None

    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for item in node.names:
                names[item.asname or item.name.partition(".")[0]] = (
                    item.name if item.asname else item.name.partition(".")[0]
                )
                yield item.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for item in node.names:
                names[item.asname or item.name] = f"{node.module}.{item.name}"
                yield f"{node.module}.{item.name}"
    for node in nodes:  # home: Any = torch.distributed
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            path = path_of(node.value)
            if path is not None and path.startswith("torch"):
                names.setdefault(node.target.id, path)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield path_of(node) or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def private(text: str) -> list[str]:
    return sorted({path for path in private_paths(ast.parse(text)) if PATH.fullmatch(path)})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch._dynamo.config", ["torch._dynamo.config"]),
        ("from torch._C import DispatchKey", ["torch._C.DispatchKey"]),
        ("from torch.overrides import _pop_mode", ["torch.overrides._pop_mode"]),
        ("from torch import overrides\noverrides._pop_mode()", ["torch.overrides._pop_mode"]),
        ("import torch\ndef f():\n    torch._int_mm(1)", ["torch._int_mm"]),
        ("import torch\nhome: Any = torch.cuda\nhome._lazy_init", ["torch.cuda._lazy_init"]),
        ('import_module("torch._inductor")', ["torch._inductor"]),
        ('import torch\nprint("torch._x is gone", torch.__version__, x._version)', []),
    ],
)
def test_the_reader_sees(text: str, expected: list[str]) -> None:
    assert private(text) == expected


def test_no_other_file_has_a_private_name_of_torch() -> None:
    replaced = {path for name, (_, path) in torch_private.table().items() if name == path}
    allowed = replaced | TEXTS.keys()
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    seen = {
        path.relative_to(PACKAGE).as_posix(): private(text)
        for path, text in texts.items()
        if path != TABLE and re.search(r"torch\b", text) and re.search(r"[. ]_\w", text)
    }
    bad = {
        file: left
        for file, paths in seen.items()
        if (left := [p for p in paths if p not in allowed and not p.startswith("torch.ops.")])
    }
    assert not bad
    assert TEXTS.keys() <= {path for paths in seen.values() for path in paths}


def test_every_name_of_the_table_is_used() -> None:
    others = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != TABLE]
    words = set(re.findall(r"\w+", "\n".join(others)))
    assert {name for name in torch_private.table() if "." not in name} <= words


def test_what_torch_has_loaded_has_every_name() -> None:
    assert torch_private.missing(loaded=True) == []


@pytest.mark.slow
@pytest.mark.subprocess
def test_torch_has_every_name_of_the_table() -> None:
    command = [sys.executable, "-m", "rooftrace.tracer.torch_private"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_has_each_row_of_the_file_once() -> None:
    top = ast.parse(TABLE.read_text(encoding="utf-8")).body
    block = next(node for node in top if isinstance(node, ast.If))
    rows = [node for node in block.body if not isinstance(node, ast.Import)]
    names = [name for name in torch_private.table() if "." not in name]
    assert len(rows) == len(names)
    paths = [path for _, path in torch_private.table().values()]
    assert len(paths) == len(set(paths))


def test_a_release_without_names_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_int_mm")
    monkeypatch.delattr(torch.cuda.nvtx, "_nvtx")
    text = f"torch {torch.__version__} lacks names that rooftrace uses: {{}}; what needs them fails"
    both = re.escape(text.format("torch._int_mm, torch.cuda.nvtx._nvtx"))
    spec = importlib.util.spec_from_file_location("fresh", TABLE)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    with pytest.warns(RuntimeWarning, match=both) as told:
        spec.loader.exec_module(fresh)
    assert len(told) == 1
    with pytest.raises(RequestError, match=both):
        _ = fresh.int_mm
    assert not fresh.has("int_mm") and fresh.has("scaled_mm")
    with pytest.raises(AttributeError, match="no attribute 'intmm'"):
        _ = fresh.intmm


def test_what_changes_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_private.current_level
    monkeypatch.setattr("torch.autograd.forward_ad._current_level", before + 1)
    assert torch_private.current_level == before + 1
