"""Writes the stub with the signatures of the functions whose arguments stand in records."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from rooftrace.reporting import signed
from rooftrace.reporting.commands import arguments, options, pricing

STUB = Path(signed.__file__).with_suffix(".pyi")
_NOTE = '"""Made by `python -m tests.reporting.signatures`; see signed.py."""\n\n'
_RECORDS = (pricing, options, arguments)


def stub() -> str:
    """The text of the stub, formatted."""
    imports: dict[str, str] = {}
    written: list[str] = []
    for name in signed.WHERE:
        function = getattr(signed, name)
        module = import_module(function.__module__)
        overloads = [n for n in _functions(module) if n.name == name and len(n.decorator_list) == 1]
        overloads = [n for n in overloads if ast.unparse(n.decorator_list[0]) == "overload"]
        texts = [ast.unparse(_without_body(each)) for each in overloads]
        shown = _shown(inspect.signature(function))
        texts = texts or [f"def {name}{shown}: ..."]
        texts[-1] = f'{texts[-1].rstrip(" .")}\n    """{function.__doc__}"""'
        for each in (module, *_RECORDS):
            imports = {**_imports(each), **imports}
        written += texts
    used = set(re.findall(r"\w+", "\n".join(written)))
    lines = sorted(t for name, t in imports.items() if name in used and name not in signed.WHERE)
    text = f"{_NOTE}{chr(10).join(lines)}\n\n{chr(10).join(written)}\n"
    for command in (["check", "--fix", "-q", "--select", "I,F401"], ["format", "-q"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", "signed.pyi", "-"],
            input=text, capture_output=True, text=True, check=True,
        )  # fmt: skip
        text = done.stdout
    return text


def _shown(signature: inspect.Signature) -> str:
    """A signature in a stub: defaults are dots."""
    parameters = [
        p if p.default is p.empty else p.replace(default=_DOTS)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters)).replace("'", "")


class _Dots:
    def __repr__(self) -> str:
        return "..."


_DOTS = _Dots()


def _functions(module: object) -> list[ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _without_body(function: ast.FunctionDef) -> ast.FunctionDef:
    function.body = [ast.Expr(ast.Constant(...))]
    return function


def _imports(module: object) -> dict[str, str]:
    """The imports of a module by the name that each gives, and its own names."""
    where = module.__name__  # type: ignore[attr-defined]
    given: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):  # type: ignore[arg-type]
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for each in node.names:
                alias = f" as {each.asname}" if each.asname else ""
                text = f"from {node.module} import {each.name}{alias}"
                given[each.asname or each.name] = text
        elif isinstance(node, ast.ClassDef):
            given.setdefault(node.name, f"from {where} import {node.name}")
        elif isinstance(node, ast.Import):
            given |= {each.name: f"import {each.name}" for each in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0])[0].isupper():
            name = ast.unparse(node.targets[0])
            given.setdefault(name, f"from {where} import {name}")
    return given


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
