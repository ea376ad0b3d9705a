"""Higher-order ops on meta tensors: flex_attention as one op, cond, and while_loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from rooftrace._processes import Shared
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import library, overrides
from rooftrace.tracer.recording.library import define
from rooftrace.tracer.recording.overrides import Scope, original_of, replaced
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.values import META, Values, trees

# -- flex attention --------------------------------------------------------------------------------
# FlexAttention on meta tensors: one op, with the number of pairs that its block mask shows.
#
# PyTorch refuses flex_attention on meta, and traces another graph for its backward.  While
# `flex_whole` is active, `rooftrace.flex_attention` replaces it.  The visible pairs come from calls
# of its mask function; they are exact where the mask depends on known values only.

_KERNEL: Any = torch_private.flex_attention
_OUTPUTS = len(get_args(get_type_hints(type(_KERNEL).__call__).get("return"))) or 3
"""Results of torch's kernel: the output, the log-sum-exp and, since 2.9, the largest scores."""

_ops: Any = torch.ops.rooftrace


def _forward_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible_pairs: int | None,
    mask: str,
) -> tuple[Tensor, Tensor]:
    *leading, width = *query.shape[:-1], value.shape[-1]
    if query.transpose(1, 2).is_contiguous():  # the output has the layout of the queries
        batch, heads, rows = leading
        out = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    else:
        out = query.new_empty((*leading, width))
    return out, query.new_empty(leading, dtype=torch.float32)


def _backward_meta(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_OPTIONS = "float scale, int? visible_pairs, str mask"
define(
    f"flex_attention(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)",
    Meta=_forward_meta,
)
define(
    "flex_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor logsumexp, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    Meta=_backward_meta,
)


class _Flex(torch.autograd.Function):
    """show: how modes of the user's code are shown a call (see `shown`)."""

    @staticmethod
    def forward(
        ctx: Any, show: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any
    ) -> Any:
        out, logsumexp = show(_ops.flex_attention, query, key, value, *options)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.show, ctx.options = show, options
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, out, logsumexp = ctx.saved_tensors
        operands = grads[0], query, key, value, out, logsumexp
        grads_of = ctx.show(_ops.flex_attention_backward, *operands, *ctx.options)
        return (None, *grads_of, None, None, None)


@contextlib.contextmanager
def flex_whole(tape: Tape) -> Iterator[None]:
    """While active, flex_attention on meta tensors is one op."""
    hop = "flex_attention_hop"
    ours = {
        "_validate_device": lambda query, key, value: None,
        hop: _whole(tape, original_of(flex, hop)),
    }
    with replaced(flex, {name: ours[name] for name in ours if hasattr(flex, name)}), _PLAIN.used():
        yield


class _InScope:
    """A flag of a module that is set in threads that are recorded, and elsewhere as it was."""

    def __init__(self, elsewhere: Any) -> None:
        self._elsewhere = elsewhere

    def __bool__(self) -> bool:
        return Scope.current() is not None or bool(self._elsewhere)


def _uncompiled() -> Callable[[], None]:
    """Let flex_attention not compile itself where it is recorded; return the undo."""
    home: Any = flex
    name = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    if not hasattr(home, name):
        return lambda: None
    before = getattr(home, name)
    ours = _InScope(before)
    setattr(home, name, ours)

    def undo() -> None:
        if getattr(home, name) is ours:
            setattr(home, name, before)

    return undo


_PLAIN = Shared(_uncompiled)


def _whole(tape: Tape, original: Any) -> Callable[..., Any]:
    """The replacement for the function with which flex_attention calls its kernel."""
    seen: dict[Any, tuple[int | None, str]] = {}

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: Sequence[Any],
        scale: float,
        options: Any,
        *captured: Any,
    ) -> Any:
        if not trees.on_meta(query):
            return original(query, key, value, score_mod, block_mask, scale, options, *captured)
        if _name(score_mod) != torch_private.flex_identity.__name__:
            tape.values.assume(
                "score-mod",
                "the work of flex_attention's score_mod, and gradients to what it reads, are not "
                "counted",
            )
        mask, planes = block_mask[-1], tuple(block_mask[2].shape[:2])
        case = (mask, planes, query.shape[-2], key.shape[-2])  # layers share their mask
        if case not in seen:
            seen[case] = _visible(tape, *case)
        run: Any = _Flex.apply
        show = _Shown(original, score_mod, block_mask, scale, options, captured)
        out, logsumexp = run(show, query, key, value, float(scale), *seen[case])
        return out, *[logsumexp] * (_OUTPUTS - 1)

    return kernel


class _Shown:
    """Calls an op of ours, shown to modes of the user's code as the higher-order op of PyTorch."""

    def __init__(
        self,
        forward: Any,
        score_mod: Any,
        block_mask: Any,
        scale: float,
        options: Any,
        captured: tuple[Any, ...],
    ) -> None:
        self._forward, self._score_mod = forward, score_mod
        self._rest = (block_mask, scale, options, *captured)

    def __call__(self, op: Any, *args: Any) -> Any:
        if not library.watched():
            return op(*args)
        if op is _ops.flex_attention:
            query, key, value, *_ = args
            public, arguments = self._forward, (query, key, value, self._score_mod, *self._rest)
        else:
            grad_out, query, key, value, out, logsumexp, *_ = args
            public = torch_private.flex_attention_backward
            graphs = (self._score_mod, None)
            arguments = (query, key, value, out, logsumexp, grad_out, None, *graphs, *self._rest)

        def run(*_: Any, **__: Any) -> Any:
            made = op(*args)
            if op is not _ops.flex_attention:
                return (*made, ())
            return (*made, *[library.unrecorded() for _ in range(_OUTPUTS - len(made))])

        # Autograd would trace another backward; torch functions have been called before.
        with torch_private.AutoDispatchBelowAutograd(), torch_private.DisableTorchFunction():
            made = library.show(public, run, *arguments)
        if made is NotImplemented:  # by a mode that takes no higher-order op
            return op(*args)
        return made[: 2 if op is _ops.flex_attention else 3]


def _visible(
    tape: Tape, mask: Any, planes: tuple[int, ...], rows: int, columns: int
) -> tuple[int | None, str]:
    """The visible pairs of one head, on average, and the kind of the mask; None where unknown."""
    if _name(mask) == flex.noop_mask.__name__:
        return None, "none"
    seen = []
    with tape.paused(), torch.no_grad():
        queries, keys = torch.arange(rows, device=META), torch.arange(columns, device=META)
        for place in itertools.product(*map(range, planes)):
            batch, head = (torch.tensor(i, device=META) for i in place)
            try:
                visible = mask(batch, head, queries[:, None], keys)
            except (RuntimeError, TypeError, IndexError):  # written for one pair at a time
                visible = torch.empty((), device=META)
            facts, _ = tape.values.mask_facts(visible, rows, columns)
            if facts is None:
                text = "flex_attention's mask is not known: all is taken as visible"
                tape.values.assume("mask", text)
                return None, "full"
            seen.append(facts)
    pairs = round(sum(facts["visible_pairs"] for facts in seen) / len(seen))
    kind = seen[0]["mask"]
    return pairs, "block" if kind == "full" else kind  # hidden blocks are always skipped


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


# -- higher order ----------------------------------------------------------------------------------
# Higher-order ops: cond runs one branch, a loop runs while its condition surely holds.

_MAX_LOOPS = 4096
"""The most iterations of a while_loop."""


_REACH_MODES = hasattr(torch_private.TorchDispatchMode, "supports_higher_order_operators")
"""Whether torch hands a higher-order op to a mode that has no rule for it."""


@contextlib.contextmanager
def higher_order_dispatched() -> Iterator[None]:
    """Inside, higher-order ops reach a recording's modes also in torch 2.8, which refuses them."""
    if _REACH_MODES:
        yield
        return
    original = original_of(torch_private.HigherOrderOperator, "dispatch")

    def dispatch(op: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode: Any = torch_private.get_current_dispatch_mode()
        takes = getattr(mode, "supports_higher_order_operators", False)
        if (
            key != torch_private.DispatchKey.Python
            or not takes
            or type(mode) in op.python_key_table
        ):
            return original(op, key, *args, **kwargs)
        overrides.pop(mode)
        try:
            return mode.__torch_dispatch__(op, [], args, kwargs)
        finally:
            overrides.push(mode)

    with replaced(torch_private.HigherOrderOperator, {"dispatch": dispatch}):
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
            scan: Any = torch_private.generic_scan
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
        return torch_private.int_mm(*args)
    return op(*torch_private.tree_map_only(Tensor, lambda t: t.to(dtype), args))


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
