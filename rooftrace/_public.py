"""The names that users call, in `rooftrace` and its modules extend, tools and types.

Former names of `rooftrace` work for one more release, with a warning.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

from rooftrace._face import face

MODULES = ("extend", "tools", "types")


def public(
    module: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a public module; dir() lists its names alone."""
    look_up, _, listed = face(module, file)
    return lambda name: _not_compiled(look_up(name), module), lambda: listed, listed


def former(name: str) -> Any:
    """An object that `rooftrace` itself gave in earlier releases; warns where it is now.

    Raises AttributeError for a name that no public module has.
    """
    for module in MODULES:
        home = importlib.import_module(f"rooftrace.{module}")
        if name in home.__all__:
            warnings.warn(
                f"rooftrace.{name} is rooftrace.{module}.{name} now; the next release drops the "
                "former name",
                DeprecationWarning,
                stacklevel=3,
            )
            value = getattr(home, name)
            setattr(sys.modules["rooftrace"], name, value)  # one warning for each name
            return value
    raise AttributeError(f"module 'rooftrace' has no attribute {name!r}")


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
