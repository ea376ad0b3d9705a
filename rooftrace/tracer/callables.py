"""Functions and exported programs wrapped as modules, so that they trace as modules do."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, fx, nn

from rooftrace.tracer.values import copies, trees

# -- exported programs -----------------------------------------------------------------------------
# An exported program as modules, with the paths and class names that they had.

_FOR_READERS = ("nn_module_stack", "stack_trace")
"""Notes kept of nodes of an exported program; the others hold fake tensors."""


def named_class(kind: type, name: str) -> Any:
    """A subclass with another name: that is what a graph calls its model."""
    return type(name, (kind,), {"__module__": kind.__module__})


class _AsItIs(list[Any]):
    """A list that copies of its owner share: nothing in it changes, and torch warns at a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsItIs:
        return self


def program_module(program: Any) -> nn.Module:
    """The modules of an exported program with their paths and class names; else one flat module."""
    from torch.export import unflatten

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch of itself, not of the program
            root: nn.Module = unflatten(program)
    except (RuntimeError, AssertionError, ValueError, AttributeError, KeyError):
        root = program.module()  # it cannot be taken apart: all ops are of the root
    if calls := getattr(root, "module_call_graph", None):
        root.__dict__["module_call_graph"] = _AsItIs(calls)
    kinds = _kinds(program)
    for path, part in root.named_modules():
        part.__class__ = named_class(type(part), kinds.get(path, "Module"))
        for graph in _graphs(part):
            for node in graph.nodes:
                node.meta = {n: v for n, v in node.meta.items() if n in _FOR_READERS}
    return root


def _kinds(program: Any) -> dict[str, str]:
    """Names of the classes of the modules, by path."""
    kinds: dict[str, str] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
            if name.isidentifier():
                kinds.setdefault(path, name)
    return kinds


def _graphs(module: nn.Module) -> Iterator[fx.Graph]:
    for name in ("graph", "graph_module"):
        item = getattr(module, name, None)
        graph = getattr(item, "graph", item)
        if isinstance(graph, fx.Graph):
            yield graph


# -- callables -------------------------------------------------------------------------------------
# Plain functions and exported programs as modules, so that they trace as modules do.
#
# A function keeps the modules, parameters and tensors that it refers to (in its closure, as a
# method, in a partial, or as globals) as its children: they move to meta with it, under their
# names.

_EXPORTED = "torch.export.exported_program"


def as_module(source: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A module for a function or a torch.export.ExportedProgram; anything else as it is.

    A function that is called with modules is a step of the user's, and stays one.
    """
    if type(source).__module__ == _EXPORTED and hasattr(source, "graph_signature"):
        return program_module(source)
    if isinstance(source, (nn.Module, type)) or not callable(source):
        return source
    if any(isinstance(item, nn.Module) for item in (*args, *kwargs.values())):
        return source
    owner = getattr(source, "__self__", None)
    if isinstance(owner, nn.Module) and getattr(source, "__name__", "") == "forward":
        return owner
    return named_class(Function, _name_of(source))(source)


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"


# -- functions -------------------------------------------------------------------------------------


class Function(nn.Module):
    """A module whose forward is a function of the user's."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        names: set[str] = {"function"}
        for name, item in _held(function):
            free = name if name not in names and not hasattr(self, name) else f"{name}_{len(names)}"
            names.add(free)
            if isinstance(item, (nn.Module, nn.Parameter)):
                setattr(self, free, item)
            else:
                self.register_buffer(free, item)
        training = [part.training for part in self.children()]
        self.training = any(training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        item = super().__getattribute__(name)
        if name == "forward" and "function" in vars(self):
            return _with_signature(item, self.function)
        return item

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: item for name, item in vars(self).items() if name != "function"}
        vars(made).update(copy.deepcopy(state, memo))
        vars(made)["function"] = copies.rebound(self.function, memo)
        return made


def _held(function: Any) -> Iterator[tuple[str, Any]]:
    """Modules and tensors that a function refers to, each once, with their names there."""
    seen: set[int] = set()
    for name, item in _references(function):
        if isinstance(item, (nn.Module, Tensor)) and id(item) not in seen:
            seen.add(id(item))
            yield name, item


def _references(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, partial):
        for index, item in enumerate(function.args):
            yield f"argument_{index}", item
        yield from function.keywords.items()
        yield from _references(function.func)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _references(function.__func__)
    elif isinstance(function, FunctionType):
        cells = map(trees.cell_content, function.__closure__ or ())
        for name, item in zip(function.__code__.co_freevars, cells, strict=True):
            yield name, item
            if isinstance(item, (FunctionType, MethodType, partial)) and item is not function:
                yield from _references(item)
        yield from copies.globals_of(function).items()
    elif isinstance(vars(type(function)).get("__call__"), FunctionType):
        yield from vars(function).items()


def _with_signature(forward: Any, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    try:
        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    except (TypeError, ValueError):  # a callable written in C does not say
        return forward
    return call
