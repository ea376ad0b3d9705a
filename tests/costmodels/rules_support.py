"""From a torch function to the OpViews of the aten ops it runs, on meta tensors.

Arguments stand under their true schema names, and those equal to the schema's default are left out,
as the tracer leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftrace.costmodels.ops.cost import Cost
from rooftrace.costmodels.ops.opview import OpView, Slot, TensorView, find_rule
from rooftrace.hardware.precisions import precision


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def index(*shape: int) -> torch.Tensor:
    """An int64 tensor without data."""
    return meta(*shape, dtype=torch.int64)


class Calls(torch.nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> object:
        return self.function(*args)


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def view_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: Any,
    facts: Mapping[str, Any] | None = None,
) -> OpView:
    """One recorded call as a rule sees it."""
    storages: dict[int, int] = {}
    slots: dict[int, int] = {}
    inputs: list[TensorView] = []

    def view(t: torch.Tensor) -> TensorView:
        if t.layout is torch.strided:
            owner, stride = t.untyped_storage()._cdata, t.stride()
        else:  # as the tracer records it: like a dense one
            owner, stride = id(t), torch.empty(t.shape, device="meta").stride()
        storage = storages.setdefault(owner, len(storages))
        unique = 1
        for n, step in zip(t.shape, stride, strict=True):
            unique *= n if step or n == 0 else 1
        dtype = precision(str(t.dtype))
        return TensorView(
            tuple(t.shape),
            dtype.name,
            tuple(stride),
            storage,
            t.numel(),
            unique,
            unique * t.element_size(),
            dtype.kind in ("float", "complex"),
        )

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(view(value))
            return Slot(slots.setdefault(id(value), len(inputs) - 1))
        if isinstance(value, (list, tuple)):
            return tuple(argument(item) for item in value)
        return value

    named = []
    for position, schema in enumerate(func._schema.arguments):
        value = (
            args[position]
            if position < len(args)
            else kwargs.get(schema.name, schema.default_value)
        )
        if (
            not isinstance(value, torch.Tensor)
            and schema.has_default_value()
            and (value == schema.default_value)
        ):
            continue
        named.append((schema.name, argument(value)))
    outputs = tuple(view(t) for t in _tensors(out))
    target = str(func) if "." in str(func) else f"{func}.default"
    return OpView(target, tuple(inputs), outputs, tuple(named), tuple((facts or {}).items()))


def views(function: Callable[[], Any], facts: Mapping[str, Any] | None = None) -> list[OpView]:
    """Every op that `function` runs, in order."""
    with _Recorder() as recorder:
        function()
    return [view_of(*call, facts=facts) for call in recorder.calls]


def view(function: Callable[[], Any], name: str = "", **facts: Any) -> OpView:
    """The one op named `name` that `function` runs (the last op if no name is given)."""
    found = [v for v in views(function, facts) if not name or v.target.split(".")[1] == name]
    assert found and (not name or len(found) == 1), f"{name}: {[v.target for v in views(function)]}"
    return found[-1]


def price(op: OpView) -> Cost:
    """What the rule for this op says."""
    found = find_rule(op.target)
    assert found is not None, f"no rule for {op.target}"
    return found.price(op)


def cost(function: Callable[[], Any], name: str = "", **facts: Any) -> Cost:
    """The cost of the op named `name`, or of everything that `function` runs."""
    if name:
        return price(view(function, name, **facts))
    total = Cost()
    for op in views(function, facts):
        total += price(op)
    return total
