"""Higher-order ops: cond runs one branch, a loop runs while its condition is known to hold."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import generic_scan
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from rooftrace.tracer.patches import contexts, original_of, replaced
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import Values

_MAX_LOOPS = 4096
"""The most iterations of a while_loop."""


_REACH_MODES = hasattr(TorchDispatchMode, "supports_higher_order_operators")
"""Whether torch hands a higher-order op to a mode that has no rule of its own for it."""


@contextlib.contextmanager
def higher_order_dispatched() -> Iterator[None]:
    """Inside, higher-order ops reach a recording's modes also in torch 2.8, which refuses them."""
    if _REACH_MODES:
        yield
        return
    original = original_of(HigherOrderOperator, "dispatch")

    def dispatch(op: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode: Any = _get_current_dispatch_mode()
        takes = getattr(mode, "supports_higher_order_operators", False)
        if key != torch._C.DispatchKey.Python or not takes or type(mode) in op.python_key_table:
            return original(op, key, *args, **kwargs)
        contexts.pop(mode)
        try:
            return mode.__torch_dispatch__(op, [], args, kwargs)
        finally:
            contexts.push(mode)

    with replaced(HigherOrderOperator, {"dispatch": dispatch}):
        yield


def run_higher_order(
    tape: Tape, again: Callable[[], AbstractContextManager[None]], func: Any, args: Any, kwargs: Any
) -> Any:
    """The result of a higher-order op; the ops that it runs are recorded, for the ops named here.

    again: switches the recorder's mode on, which torch switches off while it handles an op.
    """
    name = func.name() if callable(getattr(func, "name", None)) else str(func)
    with again():
        if name == "cond":
            condition, when_true, when_false, operands = args[:4]
            if isinstance(condition, Tensor):
                condition = bool(condition.item())
            return (when_true if condition else when_false)(*operands)
        if name == "while_loop":
            return _looped(tape.values, *args)
        if name == "scan":
            combine, start, rows, *more = args
            scan: Any = generic_scan
            return scan(combine, start, rows, additional_inputs=tuple(*more))
        if name == "invoke_subgraph":
            return args[0](*args[2:])
        if name == "out_dtype":
            return _with_wide_sums(*args)
    tape.values.assume("higher-order", f"what {name} runs inside is not recorded")
    return func(*args, **kwargs)


def _with_wide_sums(op: Any, dtype: torch.dtype, *args: Any) -> Any:
    """An op that sums in another type: a GPU has a kernel for int8 products with int32 sums."""
    tensors = trees.listed(args)
    small_integers = all(t.dtype == torch.int8 for t in tensors)
    if op is torch.ops.aten.mm.default and dtype == torch.int32 and small_integers:
        return torch._int_mm(*args)
    return op(*tree_map_only(Tensor, lambda t: t.to(dtype), args))


def _looped(values: Values, condition: Any, body: Any, carried: Any, more: Any = ()) -> Any:
    """The result of a while_loop; the body runs once if the condition is unknown."""
    for turn in itertools.count():
        go_on = condition(*carried, *more)
        if isinstance(go_on, Tensor):
            entry = values.exact(go_on)
            if entry is None:
                values.assume("branch", "while_loop runs its body once", 1)
                return body(*carried, *more) if turn == 0 else carried
            go_on = bool(entry.value)
        if go_on and turn == _MAX_LOOPS:
            values.assume("branch", f"while_loop ends after {turn:,} turns", turn)
        if not go_on or turn == _MAX_LOOPS:
            return carried
        carried = body(*carried, *more)
