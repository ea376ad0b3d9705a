"""Facts about ops and their calls: tags, schemas, names, and the tensors that they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import groups
from rooftrace.tracer.torch_private import DispatchKey, OpOverload
from rooftrace.tracer.values import trees

# -- traits ----------------------------------------------------------------------------------------
# Traits of an op that decide whether its values can be known: tags, schema, name.

UNINITIALISED = frozenset(
    {
        "aten.empty",
        "aten.empty_like",
        "aten.new_empty",
        "aten.empty_strided",
        "aten.new_empty_strided",
        "aten.empty_permuted",
    }
)

CHOOSERS = frozenset(
    f"aten.{name}"
    for name in ("argmax", "argmin", "argsort", "multinomial", "bucketize", "searchsorted")
)
"""Ops whose only output is an index that floats decide: their schema does not tell it from a count
(count_nonzero), where that of topk names its output "indices"."""


@cache
def is_random(func: Any) -> bool:
    """Whether an op draws random numbers: torch tags it so, or it takes a generator."""
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return True
    schema = getattr(func, "_schema", None)
    return schema is not None and any("Generator" in str(a.type) for a in schema.arguments)


@cache
def draws(target: str) -> bool:
    """`is_random` of a recorded target ("aten.rand.default"); False where it is not loaded."""
    namespace, name, overload = (*target.split("."), "", "")[:3]
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    return is_random(getattr(packet, overload, None))


def index_output(func: Any, source: Tensor, outputs: Sequence[Tensor]) -> int | None:
    """The output of an op with indices that it chose by the floats of `source`, if any.

    The schema names it "indices"; or, outside of aten, it is the integers next to the chosen
    floats, in equal shapes; or the op is one of CHOOSERS.
    """
    schema = func._schema
    for position, output in enumerate(outputs):
        if output.dtype.is_floating_point or output.dtype in (torch.bool, torch.uint8):
            continue
        if position < len(schema.returns) and schema.returns[position].name == "indices":
            return position
        if f"{func.namespace}.{func._opname}" in CHOOSERS:
            return position
        chosen = outputs[0]
        if (
            func.namespace not in ("aten", "prims")
            and position > 0
            and source.dtype.is_floating_point
            and chosen.dtype.is_floating_point
            and chosen.shape == output.shape
            and source.dim() == output.dim()
            and source.shape[:-1] == output.shape[:-1]
        ):
            return position
    return None


DECIDING = {
    "aten.bitwise_and": False,
    "aten.logical_and": False,
    "aten.bitwise_or": True,
    "aten.logical_or": True,
}
"""Ops on truth values, and the value of one side that makes the other one's of no matter."""


def run_on_cpu(
    name: str,
    func: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    generator: torch.Generator | None = None,
) -> Any:
    """An op on CPU tensors, as a GPU would run it."""
    if name == "aten.histc":  # CUDA counts integers too, the CPU kernel only floats
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if name == "aten._efficientzerotensor":  # of forward gradients: it has no bytes to read
        return torch.zeros(args[0], dtype=kwargs.get("dtype"))
    if generator is not None and is_random(func):
        drawer = func._overloadpacket
        return drawer(*args, **{**kwargs, "generator": generator, "device": torch.device("cpu")})
    result = func(*args, **kwargs)
    if name in UNINITIALISED:
        result.zero_()
    return result


IDENTITIES = frozenset(
    {
        "aten.detach",
        "aten.alias",
        "aten.lift_fresh",
        "aten.lift",
        "_c10d_functional.wait_tensor",
        "_c10d_functional._wrap_tensor_autograd",
    }
)
"""Ops that give a new Python object for the same value.

To wait for a collective is one: who reads the value waits, also where nobody calls it."""
QUESTIONS = frozenset({"prim.device", "aten.is_same_size", "aten._version", "aten.sym_size"})
"""Ops that only ask how a tensor looks; no device runs anything for them."""
HIDDEN_VIEWS = frozenset(
    {
        "aten._reshape_alias",
        "aten._unsafe_view",
        "fsdp.all_gather_copy_in",
        "aten.unsafe_split",
        "aten.unsafe_split_with_sizes",
    }
)
"""Ops that share memory though their schema does not say so."""
COMPOSITE = DispatchKey.CompositeImplicitAutograd
"""The dispatch key of ops that PyTorch takes apart into other ops on any device."""


def has_composite(func: Any) -> bool:
    """Whether C++ takes an op apart, on devices that have no kernel of it."""
    return bool(torch_private.has_kernel(func.name(), COMPOSITE))


def taken_apart(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a composite op as the ops that C++ takes it apart into, as on a device.

    `OpOverload.decompose` prefers Python's decompositions, which are for compilers: one takes an
    upsampling apart into 37 ops.  Returns NotImplemented where there is neither.
    """
    if has_composite(func):
        return func._op_dk(COMPOSITE, *args, **kwargs)
    return func.decompose(*args, **kwargs)


# -- calls -----------------------------------------------------------------------------------------
# Calls of ops: the facts of an op's schema, and one call of it with its arguments.


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """Facts of the schema of an op, looked up once (`info_of`)."""

    name: str  # "aten.add", without the overload
    names: tuple[str, ...]  # of its arguments
    mutated: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes
    may_alias: bool  # an output may share memory with an argument
    view: bool  # an output shares memory with an argument, and nothing is written
    answers: bool  # it returns Python values, not tensors
    composite: bool  # it is made of other ops on any device, and has no kernel

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
    """The facts of the schema of an op (an OpOverload)."""
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
            names=tuple(a.name for a in schema.arguments),
            mutated=mutated,
            may_alias=aliasing or bool(mutated),
            view=aliasing and not mutated,
            answers=answers and not groups.is_collective(func),  # that returns a handle to wait for
            composite=func.namespace != "prim"  # of which the dispatcher knows nothing
            and func.has_kernel_for_dispatch_key(COMPOSITE)
            and not func.has_kernel_for_dispatch_key(DispatchKey.CPU),
        )
    return info


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors the op of a node writes in place; [] for a node that is no op."""
    if not isinstance(node.target, OpOverload):
        return []
    info = info_of(node.target)
    return info.written_nodes(node) if info.mutated else []


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op while it is run."""

    func: Any  # the op, an OpOverload
    info: OpInfo  # facts of its schema
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor] = field(default_factory=list)  # among the arguments, in order

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
        return {**dict(zip(self.info.names, self.args, strict=False)), **self.kwargs}

    def run(self) -> Any:
        """The result of the op for these arguments."""
        return self.func(*self.args, **self.kwargs)

    def with_args(self, args: Sequence[Any]) -> Call:
        """This call with other positional arguments."""
        return replace(self, args=args)

    def written(self) -> list[Tensor]:
        """The tensors among the arguments that this call writes in place."""
        return self.info.written(self.args, self.kwargs) if self.info.mutated else []


Function = TypeVar("Function", bound=Callable[..., Any])


def entering(table: dict[str, Function], *names: str) -> Callable[[Function], Function]:
    """A decorator that enters a function into a table under these names."""

    def entered(function: Function) -> Function:
        table.update(dict.fromkeys(names, function))
        return function

    return entered
