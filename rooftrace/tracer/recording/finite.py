"""The result of a test for inf and nan on finite numbers, from the ops that compute it.

A test that uses any other op is not recognised.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

_SAME = {"aten.eq.Tensor": True, "aten.ne.Tensor": False}
"""Of a number and itself: nan alone differs."""
_INFINITE = {"aten.ne.Scalar": True, "aten.eq.Scalar": False}
"""Of a number and infinity."""
_BELOW = {
    "aten.lt.Scalar": True,
    "aten.le.Scalar": True,
    "aten.gt.Scalar": False,
    "aten.ge.Scalar": False,
}
"""Of a number and infinity; of a number and minus infinity it is the opposite."""
_TESTS = {"aten.isfinite": True, "aten.isnan": False, "aten.isinf": False}
_BOTH = ("aten.mul", "aten.logical_and", "aten.bitwise_and")
_EITHER = ("aten.logical_or", "aten.bitwise_or")
_NOT = ("aten.logical_not", "aten.bitwise_not")
_KEEPS = frozenset(
    f"aten.{name}"
    for name in (
        "all",
        "any",
        "_is_all_true",
        "_is_any_true",
        "view",
        "reshape",
        "_to_copy",
        "clone",
        "alias",
        "detach",
        "stack",
    )
)


def of_finite_numbers(node: fx.Node, depth: int = 16) -> bool | None:
    """The result of a test for inf and nan (isfinite, isnan and logic on them) on finite numbers.

    None where a recorded op is not part of such a test.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args or not depth:
        return None
    name = f"{target.namespace}.{target._opname}"
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if name in _TESTS:
        return _TESTS[name]
    if str(target) in _SAME and first is second:
        return _SAME[str(target)]
    if str(target) in _INFINITE and isinstance(second, float) and math.isinf(second):
        return _INFINITE[str(target)]
    if str(target) in _BELOW and isinstance(second, float) and math.isinf(second):
        return _BELOW[str(target)] == (second > 0)
    parts = (first, second) if name in _BOTH + _EITHER else (first,)
    if name not in _KEEPS and name not in _NOT and name not in _BOTH + _EITHER:
        return None
    if isinstance(first, (list, tuple)):
        parts = tuple(first)
    truths = [of_finite_numbers(p, depth - 1) if isinstance(p, fx.Node) else None for p in parts]
    if not truths or None in truths:
        return None
    if name in _NOT:
        return not truths[0]
    some = name in _EITHER or name in ("aten.any", "aten._is_any_true")
    return any(truths) if some else all(truths)
