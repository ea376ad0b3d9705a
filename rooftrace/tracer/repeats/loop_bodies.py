"""Bodies of loops that do the same in every turn, judged by their source and the names in it.

Such a body has no branches: it has assignments and calls of torch's functions and of tensors'
methods, on local tensors and on weights of a module.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_testing_overrides

from rooftrace.tracer.values import trees

PLAIN: tuple[type, ...] = (*trees.PLAIN, type(...))
_HIDDEN = frozenset(
    {
        "apply_",
        "backward",
        "data_ptr",
        "grad",
        "grad_fn",
        "map2_",
        "map_",
        "module_load",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "set_",
        "storage",
        "untyped_storage",
    }
)
"""Attributes of a tensor that run other code, or depend on more than its look."""
_JOINS = frozenset({("torch", "stack"), ("torch", "cat"), ("torch", "concat")})


class Refused(Exception):
    """The body does not fit: this loop has to run as it is written."""


@dataclass(frozen=True, slots=True)
class Body:
    """The names in the body of a loop, by the conditions on them.

    indexed: tensors that the loop variable indexes.  counts: integers in such indices.  chains:
    dotted names, with whether they are called.  lists: only appended to.  joined: the lists
    that the function only stacks or concatenates.
    """

    variable: str
    read: frozenset[str]
    assigned: frozenset[str]
    indexed: frozenset[str]
    counts: frozenset[str]
    lists: frozenset[str]
    chains: frozenset[tuple[tuple[str, ...], bool]]
    joined: frozenset[str] = frozenset()


_BODIES: dict[CodeType, Mapping[int, Body]] = {}


def bodies_of(code: CodeType) -> Mapping[int, Body]:
    """The loops of a function that may be cut short, by the line of their `range`."""
    bodies = _BODIES.get(code)
    if bodies is None:
        bodies = _BODIES[code] = _bodies(code)
    return bodies


def _bodies(code: CodeType) -> dict[int, Body]:
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    named = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "range"]
    local_names = {*code.co_varnames, *code.co_cellvars}
    bodies = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and _over_range(node) and named.count(node.iter.lineno) == 1:
            with contextlib.suppress(Refused):
                body = read_body(node)
                if body.assigned | {body.variable} <= local_names:
                    joined = frozenset(name for name in body.lists if _is_joined(name, node, tree))
                    line = node.iter.lineno + max(first, 1) - 1
                    bodies[line] = replace(body, joined=joined)
    return bodies


def _is_joined(name: str, loop: ast.For, tree: ast.AST) -> bool:
    """Whether code outside of the loop only makes, stacks or concatenates a list."""
    made, joined = set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.arg == name:
            return False
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.List):
            made.add(node.target)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            made.update(_new_lists(node.targets[0], node.value))
        elif isinstance(node, ast.Call) and _chain(node.func) in _JOINS:
            joined.update(node.args[:1])
    mentions = {n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name}
    return bool(mentions & made) and mentions <= made | joined | {*ast.walk(loop)}


def _new_lists(target: ast.expr, value: ast.expr) -> list[ast.expr]:
    """The targets of an assignment that become a list display."""
    if isinstance(value, ast.List):
        return [target]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=False)
        return [inner for inner, item in pairs if isinstance(item, ast.List)]
    return []


def _over_range(loop: ast.For) -> bool:
    made = loop.iter
    return (
        isinstance(made, ast.Call)
        and isinstance(made.func, ast.Name)
        and made.func.id == "range"
        and made.lineno == made.end_lineno
    )


def read_body(loop: ast.For) -> Body:
    """The names in a loop's body.  Raises Refused if its turns may do different things."""
    if loop.orelse or not isinstance(loop.target, ast.Name):
        raise Refused
    reader = _Reader(loop.target.id)
    for statement in loop.body:
        reader.statement(statement)
    return reader.body()


class _Reader:
    """Walks through the statements of a body; refuses every construct that is not handled here."""

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self.read: set[str] = set()
        self.assigned: set[str] = set()
        self.indexed: set[str] = set()
        self.counts: set[str] = set()
        self.lists: set[str] = set()
        self.chains: set[tuple[tuple[str, ...], bool]] = set()

    def body(self) -> Body:
        roots = {chain[0] for chain, _ in self.chains}
        used = self.read | self.assigned | self.indexed | self.counts | roots
        if self.variable in used | self.lists or self.lists & used:
            raise Refused
        if (self.indexed | self.counts) & self.assigned:
            raise Refused
        return Body(
            variable=self.variable,
            read=frozenset(self.read),
            assigned=frozenset(self.assigned),
            indexed=frozenset(self.indexed),
            counts=frozenset(self.counts),
            lists=frozenset(self.lists),
            chains=frozenset(self.chains),
        )

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            self.value(node.value)
            for target in node.targets:
                self.target(target)
        elif isinstance(node, ast.AugAssign):
            self.value(node.value)
            self.target(node.target)
            if isinstance(node.target, ast.Name):
                self.read.add(node.target.id)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.value(node.value)
            self.target(node.target)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self.removed(target)
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Constant)):
            if not self.appended(node.value):
                self.value(node.value)
        elif not isinstance(node, ast.Pass):
            raise Refused

    def target(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self.assigned.add(node.id)
        elif isinstance(node, (ast.Tuple, ast.List)):
            for item in node.elts:
                self.target(item)
        elif isinstance(node, ast.Subscript):
            self.subscript(node)
        else:
            raise Refused

    def removed(self, node: ast.expr) -> None:
        if not isinstance(node, ast.Name):
            raise Refused
        self.assigned.add(node.id)

    def appended(self, node: ast.expr) -> bool:
        """Whether this is `NAME.append(value)`."""
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and isinstance(node.func.value, ast.Name)
            and len(node.args) == 1
            and not node.keywords
        ):
            self.value(node.args[0])
            self.lists.add(node.func.value.id)
            return True
        return False

    def value(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            self.read.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.attribute(node, called=False)
        elif isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Subscript):
            self.subscript(node)
        elif isinstance(node, ast.BinOp):
            self.value(node.left)
            self.value(node.right)
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            self.value(node.operand)
        elif isinstance(node, (ast.Tuple, ast.List)):
            for item in node.elts:
                self.value(item)
        elif isinstance(node, ast.Slice):
            for part in (node.lower, node.upper, node.step):
                if part is not None:
                    self.value(part)
        elif not isinstance(node, ast.Constant):
            raise Refused

    def attribute(self, node: ast.Attribute, called: bool) -> None:
        chain = _chain(node)
        for name in chain[1:] if chain else (node.attr,):
            if name.startswith("_") or name in _HIDDEN:
                raise Refused
        if chain:
            self.chains.add((chain, called))
        elif called and not _is_method(node.attr):
            raise Refused
        else:
            self.value(node.value)

    def call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            self.chains.add(((node.func.id,), True))
        elif isinstance(node.func, ast.Attribute):
            self.attribute(node.func, called=True)
        else:
            raise Refused
        for item in node.args:
            self.value(item)
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Refused
            self.value(keyword.value)

    def subscript(self, node: ast.Subscript) -> None:
        if not self.mentions(node.slice):
            self.value(node.value)
            self.value(node.slice)
        elif isinstance(node.value, ast.Name):
            self.indexed.add(node.value.id)
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for place in parts:
                self.place(place)
        else:
            raise Refused

    def place(self, node: ast.expr) -> None:
        """One dimension of an index; where it names the loop variable it moves by equal steps."""
        if not self.mentions(node):
            self.value(node)
        elif isinstance(node, ast.Slice):
            for part in (node.lower, node.upper):
                if part is not None:
                    self.place(part)
            if node.step is not None:
                self.value(node.step)
        else:
            self.steps(node)

    def steps(self, node: ast.expr) -> None:
        if isinstance(node, ast.Name):
            if node.id != self.variable:
                self.counts.add(node.id)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            self.steps(node.operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            both = self.mentions(node.left) and self.mentions(node.right)
            if both and isinstance(node.op, ast.Mult):
                raise Refused
            self.steps(node.left)
            self.steps(node.right)
        elif not (isinstance(node, ast.Constant) and type(node.value) is int):
            raise Refused

    def mentions(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id == self.variable for n in ast.walk(node))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The steps of `a.b.c`; empty where it does not begin with a name."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.append(node.attr)
        node = node.value
    return (node.id, *reversed(steps)) if isinstance(node, ast.Name) else ()


# -- the objects behind the names ------------------------------------------------------------------


def _is_method(name: str) -> bool:
    return getattr(Tensor, name, None) in get_testing_overrides()


def _is_function(item: Any) -> bool:
    """Whether this is a function of torch on tensors."""
    if not callable(item) or getattr(item, "__name__", "") in _HIDDEN:
        return False
    if getattr(item, "__module__", "") == nn.functional.__name__:
        return isinstance(item, FunctionType)
    return item in get_testing_overrides()


class FrameNames:
    """The names that one frame sees now."""

    def __init__(self, frame: FrameType) -> None:
        self._places = (frame.f_locals, frame.f_globals, vars(builtins))
        # Before Python 3.13 the locals of a function are a copy, which stays with the frame.
        copied = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(frame.f_locals) is dict
        self._copied = copied

    def forget(self) -> None:
        """Release the objects behind the names: we must not prolong their lives."""
        if self._copied:
            self._places[0].clear()

    def get(self, name: str) -> Any:
        for place in self._places:
            if name in place:
                return place[name]
        raise Refused

    def local(self, name: str) -> Any:
        """A name that the body assigns; None where it is deleted again."""
        return self._places[0].get(name)

    def stands(self, chain: tuple[str, ...], called: bool) -> bool:
        """Whether a dotted name is torch's, a weight, or an attribute or a method of a tensor."""
        root = self.get(chain[0])
        if isinstance(root, nn.Module):
            return len(chain) == 2 and not called and _is_weight(root, chain[1])
        if isinstance(root, ModuleType):
            item: Any = root
            for name in chain[1:]:
                item = getattr(item, name, Refused)
            return _is_function(item) if called else isinstance(item, PLAIN)
        if len(chain) == 1:
            return called and _is_function(root)
        return is_value(root) and (not called or _is_method(chain[-1]))


def _is_weight(module: nn.Module, name: str) -> bool:
    """Whether this attribute is a parameter or a buffer that the module itself looks up."""
    kind = type(module)
    plain = kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, name)
    weight = module._parameters.get(name, module._buffers.get(name))
    return plain and name not in vars(module) and is_tensor(weight)


def is_tensor(item: Any) -> bool:
    return type(item) in (Tensor, nn.Parameter) and item.layout is torch.strided


def is_value(item: Any) -> bool:
    if isinstance(item, tuple):
        return all(is_value(x) for x in item)
    return is_tensor(item) or isinstance(item, PLAIN)


def fits(body: Body, names: FrameNames) -> bool:
    """Whether the names stand for the kinds of objects that `read_body` assumed."""
    return (
        all(names.stands(chain, called) for chain, called in body.chains)
        and all(is_tensor(names.get(name)) for name in body.indexed)
        and all(type(names.get(name)) is int for name in body.counts)
        and all(type(names.get(name)) is list for name in body.lists)
    )
