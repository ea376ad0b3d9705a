"""Calls of ops: what the schema of an op says, and one call of it with its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from rooftrace.tracer.ops import groups
from rooftrace.tracer.ops.traits import COMPOSITE, HIDDEN_VIEWS
from rooftrace.tracer.tensors import trees


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """What the schema of an op says, looked up once (`info_of`)."""

    name: str  # "aten.add", without the overload
    mutated: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes
    may_alias: bool  # an output may share memory with an argument
    view: bool  # an output shares memory with an argument, and nothing is written
    answers: bool  # it returns Python values, not tensors
    composite: bool  # it is made of other ops on any device, and has no kernel of its own

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments that a call writes in place."""
        tensors: list[Tensor] = []
        for position, name in self.mutated:
            item = args[position] if position < len(args) else kwargs.get(name)
            trees.arguments_in((item,), tensors)
        return tensors

    def written_nodes(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose tensors a recorded call writes in place."""
        nodes: list[fx.Node] = []
        for position, name in self.mutated:
            item = node.args[position] if position < len(node.args) else node.kwargs.get(name)
            items = item if isinstance(item, (list, tuple)) else [item]
            nodes += [part for part in items if isinstance(part, fx.Node)]
        return nodes


_INFO: dict[Any, OpInfo] = {}


def info_of(func: Any) -> OpInfo:
    """What the schema of an op (an OpOverload) says."""
    info = _INFO.get(func)
    if info is None:
        schema = func._schema
        name = f"{func.namespace}.{func._opname}"
        mutated = tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        )
        mutated = mutated or groups.written(func)
        aliasing = name in HIDDEN_VIEWS or any(r.alias_info is not None for r in schema.returns)
        answers = bool(schema.returns) and not any("Tensor" in str(r.type) for r in schema.returns)
        info = _INFO[func] = OpInfo(
            name=name,
            mutated=mutated,
            may_alias=aliasing or bool(mutated),
            view=aliasing and not mutated,
            answers=answers and not groups.is_collective(func),  # that returns a handle to wait for
            composite=func.namespace != "prim"  # of which the dispatcher knows nothing
            and func.has_kernel_for_dispatch_key(COMPOSITE)
            and not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU),
        )
    return info


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors the op of a node writes in place; [] for a node that is no op."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    info = info_of(node.target)
    return info.written_nodes(node) if info.mutated else []


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op while it is run."""

    func: Any  # the op, an OpOverload
    info: OpInfo  # what its schema says
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor] = field(default_factory=list)  # those among the arguments, in order

    @classmethod
    def of(cls, func: Any, *args: Any, **kwargs: Any) -> Call:
        """A call of `func` with these arguments."""
        tensors: list[Tensor] = []
        trees.arguments_in(args, tensors)
        if kwargs:
            trees.arguments_in(kwargs.values(), tensors)
        return cls(func, info_of(func), args, kwargs, tensors)

    @property
    def name(self) -> str:
        """The name of the op without the overload: "aten.add"."""
        return self.info.name

    @property
    def short_name(self) -> str:
        """The name as people know it: "add" for "aten.add"."""
        return self.info.name.removeprefix("aten.")

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the names that the schema has for them; defaults are not there."""
        names = (argument.name for argument in self.func._schema.arguments)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    def run(self) -> Any:
        """What the op returns for these arguments."""
        return self.func(*self.args, **self.kwargs)

    def with_args(self, args: Sequence[Any]) -> Call:
        """This call with other positional arguments."""
        return replace(self, args=args)

    def written(self) -> list[Tensor]:
        """The tensors among the arguments that this call writes in place."""
        return self.info.written(self.args, self.kwargs) if self.info.mutated else []
