"""A package's face: the names that it gives to others, looked up when they are first used.

The stub beside a package's `__init__.py` says each name once, for readers, for type checkers and
for this file:

    # rooftrace/graph/__init__.pyi
    from rooftrace.graph.graph import Op as Op, OpGraph as OpGraph

So importing a package loads nothing that is slow, and packages that need each other's names at
run time do not wait for each other while they load.  This is SPEC 1 of Scientific Python; its
library, lazy_loader, is no dependency because `make measure` runs where torch alone is there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from rooftrace.errors import hint


def names(package: str, stub: str) -> dict[str, tuple[str, str | None]]:
    """{public name: (module, name in it)} by the text of a stub; None: the module itself."""
    where: dict[str, tuple[str, str | None]] = {}
    for node in ast.walk(ast.parse(stub)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                if node.module == package:  # from rooftrace.hardware import units as units
                    where[name.name] = (f"{package}.{name.name}", None)
                elif name.asname is not None:  # only `as` makes a name of a stub public
                    where[name.asname] = (node.module, name.name)
    return where


def face(
    package: str, init: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package`, whose `__init__.py` is the file `init`.

    A name that the stub does not give raises AttributeError, as it does in any module.
    """
    where = names(package, Path(init).with_suffix(".pyi").read_text(encoding="utf-8"))

    def __getattr__(name: str) -> Any:
        if name not in where:
            rooms = [module for module, attribute in where.values() if attribute is None]
            stubs = {room: Path(init).with_name(f"{room.rpartition('.')[2]}.pyi") for room in rooms}
            read = {room: stub.read_text("utf-8") for room, stub in stubs.items() if stub.is_file()}
            there = [f"; it is {room}.{name}" for room in read if name in names(room, read[room])]
            why = there[0] if there else hint(name, list(where))
            raise AttributeError(f"module {package!r} has no attribute {name!r}{why}")
        module, attribute = where[name]
        value: Any = importlib.import_module(module)
        if attribute is not None:
            value = getattr(value, attribute)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *where})

    return __getattr__, __dir__, sorted(where)


# -- public modules --------------------------------------------------------------------------------
# The names that users call, in `rooftrace` and its modules extend, tools and types.


def public(
    module: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a public module; dir() lists its names alone."""
    look_up, _, listed = face(module, file)
    return lambda name: _not_compiled(look_up(name), module), lambda: listed, listed


def _not_compiled(value: Any, module: str) -> Any:
    """Mark a function of a public module: code that torch.compile compiles calls it as it is.

    With fullgraph=True, Dynamo refuses the call with the message that stands here.
    """
    if isinstance(value, FunctionType):
        vars(value)["_torchdynamo_disable"] = True
        vars(value)["_torchdynamo_disable_msg"] = (
            f"{module}.{value.__name__} is no part of a graph; call it outside of torch.compile"
        )
        if "torch" in sys.modules:  # the functions that it calls are not compiled either
            with contextlib.suppress(AttributeError):  # an older release has no word for it
                dynamo = sys.modules["torch"]._C._dynamo.eval_frame
                skipped = dynamo._FrameAction.SKIP
                strategy = dynamo._FrameExecStrategy(skipped, skipped)
                dynamo.set_code_exec_strategy(value.__code__, strategy)
    return value
