"""An exported program as modules, with the paths and class names that they had."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

_FOR_READERS = ("nn_module_stack", "stack_trace")
"""What is kept of the notes on nodes of an exported program; the rest has fake tensors."""


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
