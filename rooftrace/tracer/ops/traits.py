"""What torch says of an op that decides whether its values can be known: tags, schema, name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
    """Which output of an op holds indices that it chose by the floats of `source`, if any does.

    The schema names it "indices"; or, outside of aten, it is the whole numbers beside the floats
    that were chosen, in equal shapes; or the op is one of CHOOSERS.
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
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The dispatch key of ops that PyTorch takes apart into other ops on any device."""
