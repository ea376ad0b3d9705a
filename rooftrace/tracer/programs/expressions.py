"""Sizes that a file writes as expressions: checked to be plain arithmetic, and evaluated.

torch evaluates such a text as Python, so nothing else may stand in it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

_MOST_LETTERS = 10_000
_MOST_POWER = 8
_MOST_POWERS = 3
_MOST = 1 << 63
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Integer": int,
    "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: math.prod(parts),
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Pow": lambda a, b: a**b,
}
_ONLY_READ = (
    "Symbol",
    "Eq",
    "Ne",
    "Lt",
    "Le",
    "Gt",
    "Ge",
    "And",
    "Or",
    "Not",
    "Rational",
    "Float",
    "Equality",
    "Unequality",
    "StrictLessThan",
    "LessThan",
    "StrictGreaterThan",
    "GreaterThan",
    "ModularIndexing",
    "IntTrueDiv",
    "ToFloat",
    "TruncToInt",
    "FloatTrueDiv",
)


class ExpressionError(ValueError):
    """A text that is no arithmetic of sizes."""


def checked(text: str) -> ast.expr:
    """The expression of a text.  Raises ExpressionError for anything but arithmetic of sizes."""
    if len(text) > _MOST_LETTERS:
        raise ExpressionError(f"an expression of {len(text):,} letters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(f"{text!r:.80} is no expression") from None
    nodes = list(_inside(tree))
    if not all(map(_is_plain, nodes)) or sum(map(_is_power, nodes)) > _MOST_POWERS:
        raise ExpressionError(f"{text!r:.80} is more than arithmetic of sizes")
    return tree


def _inside(tree: ast.expr) -> Iterator[ast.AST]:
    """Every node that stands for a value."""
    yield tree
    if isinstance(tree, ast.Call):
        for part in tree.args:
            yield from _inside(part)
        yield from tree.keywords
    elif isinstance(tree, ast.BinOp):
        yield from _inside(tree.left)
        yield from _inside(tree.right)
    elif isinstance(tree, ast.UnaryOp):
        yield from _inside(tree.operand)


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        texts = [p for p in node.args if isinstance(p, ast.Constant) and isinstance(p.value, str)]
        named = name in _FUNCTIONS or name in _ONLY_READ
        power = name != "Pow" or (len(node.args) == 2 and _is_small(node.args[1]))
        return named and power and len(texts) == (1 if name in ("Symbol", "Float") else 0)
    if isinstance(node, ast.keyword):
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        return isinstance(value, (bool, int)) and (node.arg or "").isidentifier()
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return node.value.replace(".", "").isidentifier() or _is_number(node.value)
        return isinstance(node.value, (bool, float)) or (
            isinstance(node.value, int) and abs(node.value) < _MOST
        )
    if isinstance(node, ast.Name):
        return node.id.isidentifier() and not node.id.startswith("_") and node.id[-1:].isdigit()
    if isinstance(node, ast.BinOp):
        power = not isinstance(node.op, ast.Pow) or _is_small(node.right)
        return power and isinstance(
            node.op, (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.Div)
        )
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd))


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Pow"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_small(power: ast.expr) -> bool:
    """Whether a power is a whole number that makes no giant."""
    if isinstance(power, ast.Call) and len(power.args) == 1:
        power = power.args[0]
    if isinstance(power, ast.UnaryOp):
        power = power.operand
    value = power.value if isinstance(power, ast.Constant) else None
    return isinstance(value, int) and abs(value) <= _MOST_POWER


def _symbol(tree: ast.expr) -> str | None:
    if isinstance(tree, ast.Name):
        return tree.id
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "Symbol":
        first = tree.args[0]
        return str(first.value) if isinstance(first, ast.Constant) else None
    return None


def evaluated(text: str, sizes: Mapping[str, int]) -> int:
    """The value of an expression.  Raises ExpressionError where it has no whole number."""
    try:
        return _value(checked(text), sizes)
    except (KeyError, TypeError, ZeroDivisionError, OverflowError):
        raise ExpressionError(f"{text!r:.80} has no value") from None


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    symbol = _symbol(tree)
    if symbol is not None:
        return sizes[symbol]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
        values: Sequence[int] = [_value(part, sizes) for part in tree.args]
        return _FUNCTIONS[tree.func.id](*values)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return int(tree.value)
    if isinstance(tree, ast.BinOp):
        left, right = _value(tree.left, sizes), _value(tree.right, sizes)
        operations: Mapping[type, str] = {
            ast.Add: "Add",
            ast.Mult: "Mul",
            ast.FloorDiv: "FloorDiv",
            ast.Mod: "Mod",
            ast.Pow: "Pow",
        }
        if isinstance(tree.op, ast.Sub):
            return left - right
        return _FUNCTIONS[operations[type(tree.op)]](left, right)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value(tree.operand, sizes)
    raise TypeError(tree)
