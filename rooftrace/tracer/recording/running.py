"""Running one op on meta: its values are followed, and it is recorded.

Ops that a meta run alone cannot do are in `by_value` (they depend on values) and in `substitutes`
(they have no meta kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from rooftrace.graph import Tensor as Value, assumptions
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import groups, ops, taperecords
from rooftrace.tracer.recording.by_value import by_value
from rooftrace.tracer.recording.exchanged import (
    after_exchange,
    before_exchange,
    exchanged_on_host,
    expect_counts,
    expect_counts_of_others,
)
from rooftrace.tracer.recording.facts import learn_facts, learn_mask_facts
from rooftrace.tracer.recording.kernel_checks import check_kernel
from rooftrace.tracer.recording.ops import Call, info_of
from rooftrace.tracer.recording.recurrent import whole_entry
from rooftrace.tracer.recording.sparse import run_sparse
from rooftrace.tracer.recording.substitutes import off_host, without_meta_kernel
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import Values, masks, trees

_LIFT = torch.ops.aten.lift_fresh.default
"""The op by which numbers of Python, or of numpy, become a tensor."""


class Runner:
    """Runs the ops of one recording, one at a time.

    again: switches the recorder's mode on, which torch switches off while it handles an op.
    device: that meta tensors stand for, where host tensors are apart from it.
    """

    def __init__(self, tape: Tape, again: Callable[[], AbstractContextManager[None]]) -> None:
        self._tape, self._again = tape, again
        self._sizes = SizeCache()
        self.device: torch.device | None = None

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one op, follow its values, record it; returns its result."""
        tape, info = self._tape, info_of(func)
        name = info.name
        if name in ops.QUESTIONS or name.startswith("profiler."):
            return func(*args, **kwargs)
        if info.composite or (tape.here.inside and ops.has_composite(func)):
            # PyTorch has taken such ops apart before a mode sees them, but the ones inside of an
            # op of ours, or of a tensor subclass.
            with self._again():
                replacement = whole_entry(func)
                if replacement is not None:
                    return replacement(*args, **kwargs)
                return ops.taken_apart(func, args, kwargs)
        call = Call.of(func, *args, **kwargs)
        tape.tags.recognise(call.tensors)
        if _on_host(call.tensors, kwargs.get("device")):
            tape.rolling.depends()
            if not _of_the_step(tape, call):
                if tape.generators is not None and ops.is_random(func):
                    return tape.generators.run(func, args, kwargs)
                if fsdp.running and groups.is_collective(func):
                    return exchanged_on_host(tape, call)
                return func(*args, **kwargs)
        out = run_sparse(tape, call, self._again)
        if out is not NotImplemented:
            return out
        if name in ops.IDENTITIES and call.tensors:
            return _same_value(tape, call)
        check_kernel(call, self.device)
        out = by_value(tape, call)
        return self._on_meta(call) if out is NotImplemented else out

    def _on_meta(self, call: Call) -> Any:
        """Run and record an op that depends on no value."""
        tape, facts = self._tape, dict[str, Any]()
        sent = before_exchange(tape, call)
        try:
            out = self._computed(call)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            out = without_meta_kernel(tape, call, error)
            facts["fallback"] = type(error).__name__
        else:
            out = off_host(tape, call, out)
        single = isinstance(out, Tensor)
        outputs = [out] if single else trees.listed(out)
        with tape.values.uniform.followed(call, outputs):
            taint = _propagate(tape, call, outputs)
        taint |= learn_facts(tape.values, call, facts)
        taint |= learn_mask_facts(tape.values, call, outputs, facts)
        taint |= expect_counts(tape, call, facts)
        together = groups.communicates(call.func, call.args, call.kwargs, outputs)
        if together is not None:
            facts["group_size"] = together[1].size
            taint |= expect_counts_of_others(tape, call, outputs, together)
            taint |= after_exchange(tape, call, outputs, sent, together)
        if outputs and call.info.mutated and call.func.namespace != "aten":
            facts["writes"] = tuple(name for _, name in call.info.mutated)  # besides its results
        tape.record(call, outputs, single=single, facts=facts, taint=taint, together=together)
        return out

    def _computed(self, call: Call) -> Any:
        """The result of an op on meta."""
        generators = self._tape.generators
        if generators is not None and ops.is_random(call.func) and _on_host(call.tensors, None):
            return generators.run(call.func, call.args, call.kwargs)
        if not call.info.may_alias:
            return self._sizes.run(call.func, call.args, dict(call.kwargs))
        return None if writes_lists(call.name, call.args) else call.run()


def _on_host(tensors: list[Tensor], device: Any) -> bool:
    """Whether an op reads and makes CPU tensors only."""
    if device is not None and torch.device(device).type != "cpu":
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return False
    return bool(tensors) or device is not None


def _of_the_step(tape: Tape, call: Call) -> bool:
    """Whether an op on CPU tensors is work of the step, and not bookkeeping of the host.

    Ops on weights or on floats of the step are work of the step; so is every matrix product.
    """
    plain = (Tensor, nn.Parameter)
    if not tape.recording or any(type(tensor) not in plain for tensor in call.tensors):
        return False  # of fake tensors only the sizes are read
    if call.func._overloadpacket in flop_registry:
        return True
    for tensor in call.tensors:
        if isinstance(tensor, nn.Parameter):
            return True
        if tape.tags.has(tensor) and tensor.is_floating_point():
            entry = tape.entries.entry_of(tensor)
            if entry is None or entry.kind != "constant":
                return True
    return False


def _same_value(tape: Tape, call: Call) -> Tensor:
    """detach and its like: a new Python object for the same value."""
    tensor, out = call.tensors[0], call.run()
    tape.tags.same_as(out, tensor)
    if call.func is _LIFT and tape.recording and not tape.tags.has(out):
        tape.entries.constant(out)
    entry = tape.values.held(tensor)
    if entry is not None:
        tape.values.learn(out, entry.value, entry.taint)
    return out  # type: ignore[no-any-return]


def _settle_tests(values: Values, call: Call) -> None:
    """Results of tests for inf and nan that go on as numbers (a count of them) become known."""
    for tensor in call.tensors:
        if tensor.dtype != torch.bool or tensor.numel() != 1 or values.known(tensor) is not None:
            continue
        finite = values.finite(tensor)
        if finite is not None and values.decision("branch") is None:
            text = f"{call.name} reads a test for inf and nan: unknown numbers are taken as finite"
            taint = frozenset([values.assume("finite", text, finite)])
            values.learn(tensor, torch.full(tuple(tensor.shape), finite), taint)


def _propagate(tape: Tape, call: Call, outputs: Sequence[Tensor]) -> frozenset[int]:
    """Follow known values through one op; returns the assumptions that its outputs rest on."""
    values, info = tape.values, call.info
    if outputs and outputs[0].dtype != torch.bool:
        _settle_tests(values, call)
    all_known = True
    for tensor in call.tensors:
        if values.key not in tensor.__dict__ and tensor.device.type != "cpu":
            all_known = False
            break
    if (
        all_known
        and (outputs or info.mutated)
        and (not outputs or outputs[0].device.type == "meta")
    ):
        taint = values.propagate(call, outputs)
        if taint is not None:
            return taint
    else:
        taint = values.imply(call, outputs)
        if taint is not None:
            return taint
    if info.name in ops.DECIDING and not info.mutated and len(outputs) == 1:
        decided = values.decide(info.name, call.tensors, outputs[0])
        if decided is not None:
            return decided
    if not call.tensors:
        return taperecords.NO_TAINT
    position = ops.index_output(call.func, call.tensors[0], outputs)
    if position is not None and outputs[0].is_meta:
        return route(tape, call, outputs[position], position)
    return taperecords.NO_TAINT


# -- routing ---------------------------------------------------------------------------------------
# Indices that an op chooses by unknown scores: topk, argmax, sort, multinomial ...


def route(tape: Tape, call: Call, index: Tensor, position: int) -> frozenset[int]:
    """Learn values by a policy for an index output of a call, or values from real data.

    position: the position of that output.  Returns the assumptions that the values rest on.
    """
    values = tape.values
    if index.dtype.is_floating_point:
        return taperecords.NO_TAINT
    if values.decision(assumptions.ROUTING) is None and _as_the_data_chooses(
        tape, call, index, position
    ):
        return taperecords.NO_TAINT
    dimension = call.named.get("dim")
    along = -1 if dimension is None else int(dimension)
    sorts = any(argument.name == "descending" for argument in call.func._schema.arguments)
    source = call.tensors[0]
    routed = values.route(call.name, source, index, along, sorts=sorts)
    return taperecords.NO_TAINT if routed is None else frozenset([routed])


def _as_the_data_chooses(tape: Tape, call: Call, index: Tensor, position: int) -> bool:
    """Learn indices from the real tensors, as an assumption; False if they give none."""
    if index.numel() > masks.MAX_CHOSEN:
        return False
    values, exact = tape.values, {}
    for tensor in trees.listed(call.args):
        entry = values.known(tensor)
        value = values.compute(tensor) if entry is None else entry.value
        if value is None or (entry is not None and entry.taint):
            return False
        exact[id(tensor)] = value
    args, kwargs = torch_private.tree_map_only(
        Tensor, lambda t: exact[id(t)], (tuple(call.args), dict(call.kwargs))
    )
    with torch_private.disable_current_modes(), torch.no_grad():
        try:
            if tape.generators is not None and ops.is_random(call.func):
                results = tape.generators.run(call.func, args, kwargs)
            else:
                results = ops.run_on_cpu(call.name, call.func, list(args), kwargs)
        except (NotImplementedError, RuntimeError):  # no kernel for a CPU, or not for these types
            return False
    values.computed += 1
    values.learn(index, trees.listed(results)[position])
    values.assume("data-routing", f"{call.name} chooses as the given weights and inputs do")
    return True


# -- sizes -----------------------------------------------------------------------------------------
# Output sizes of ops that ran before: most of a model's ops repeat with equal sizes.
#
# PyTorch's meta kernels are Python for many ops and take ten times as long as a look-up.  Only ops
# that neither write nor return their inputs' memory are remembered: each output is a fresh tensor.


_CONVOLUTION = torch.ops.aten.convolution.default
_META = torch.device("meta")
_NEVER = object()


class SizeCache:
    """Runs functional ops on meta tensors, each with the same sizes once."""

    def __init__(self) -> None:
        self._recipes: dict[Any, Any] = {}

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of `func(*args, **kwargs)`, from the sizes of an equal earlier call if any.

        Only for ops without aliasing or mutation, on strided meta tensors.
        """
        key: list[Any] = [func, torch.get_default_dtype()]
        named = [item for pair in kwargs.items() for item in pair]
        if not (_describe(args, key) and _describe(named, key)):
            return _run(func, args, kwargs)
        signature = tuple(key)
        try:
            made = self._recipes.get(signature)
        except TypeError:  # an argument that cannot be hashed (a symbolic size, a generator)
            return _run(func, args, kwargs)
        if made is None and not kwargs:
            made = self._recipes[signature] = known_sizes(func, args)
        if made is None:
            result = _run(func, args, kwargs)
            self._recipes[signature] = _recipe(result, args, kwargs)
            return result
        if made is _NEVER:
            return _run(func, args, kwargs)
        kind, outputs = made
        tensors = [
            None if spec is None else torch.empty_strided(*spec[:2], dtype=spec[2], device=_META)
            for spec in outputs
        ]
        return tensors[0] if kind is Tensor else kind(tensors)


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op; a convolution's result gets the layout that it has on a device.

    cuDNN and oneDNN write channels last where the input or the weight is so; on meta the result is
    always contiguous.
    """
    result = func(*args, **kwargs)
    if func is _CONVOLUTION and result.dim() == 4 and any(map(_channels_last, args[:2])):
        return result.contiguous(memory_format=torch.channels_last)
    return result


def _channels_last(tensor: Tensor) -> bool:
    return torch_private.suggest_memory_format(tensor) is torch.channels_last


def writes_lists(name: str, args: Sequence[Any]) -> bool:
    """Whether an op writes tensors of a list in place, each from others of its size.

    On meta such a call does nothing, and takes as long as one op for each tensor.
    """
    if not name.startswith("aten._foreach_") or not name.endswith("_"):
        return False
    lists = [item for item in args if isinstance(item, (list, tuple)) and item]
    lists = [item for item in lists if isinstance(item[0], Tensor)]
    return bool(lists) and all(
        len(item) == len(lists[0])
        and all(a.shape == b.shape for a, b in zip(item, lists[0], strict=True))
        for item in lists[1:]
    )


def _describe(items: Sequence[Any], key: list[Any]) -> bool:
    """Append everything that the sizes of an op's outputs depend on; False if that is unknown."""
    for item in items:
        if isinstance(item, Tensor):
            if (
                item.layout is not torch.strided
                or item.device.type != "meta"
                or item.dtype.is_complex
            ):
                return False
            key.append((item.shape, item.stride(), item.dtype))
        elif isinstance(item, (list, tuple)):
            key.append(len(item))
            if not _describe(item, key):
                return False
        else:
            # 1, 1.0 and True are equal as keys, and promote differently.
            key.append(type(item))
            key.append(item)
    return True


def _recipe(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(type, size of each output) of a call; _NEVER where outputs are not fresh tensors."""
    kind = Tensor if isinstance(result, Tensor) else type(result)
    if kind not in (Tensor, tuple, list):
        return _NEVER
    outputs = (result,) if kind is Tensor else result
    storages = set()
    specs: list[Any] = []
    for output in outputs:
        if output is None:
            specs.append(None)
            continue
        plain = isinstance(output, Tensor) and output.layout is torch.strided
        if not plain or output.device.type != "meta" or output.storage_offset():
            return _NEVER
        storages.add(output.untyped_storage()._cdata)
        specs.append((tuple(output.shape), output.stride(), output.dtype))
    fresh = len(storages) == sum(spec is not None for spec in specs)
    return (
        (kind, tuple(specs))
        if fresh and not storages & _storages((args, kwargs.values()))
        else _NEVER
    )


def _storages(items: Any) -> set[int]:
    storages: set[int] = set()
    for item in items:
        if isinstance(item, Tensor):
            storages.add(item.untyped_storage()._cdata)
        elif not isinstance(item, (str, bytes)) and hasattr(item, "__iter__"):
            storages |= _storages(item)
    return storages


# -- known sizes -----------------------------------------------------------------------------------
# Most meta kernels of torch are Python, and take 0.1 to 2 ms.  What they give for plain tensors
# is a `_recipe`; None for others, which the kernel runs or refuses.


def known_sizes(func: Any, args: Sequence[Any]) -> Any:
    """The recipe of an op whose sizes are known without its kernel; None for others."""
    if (form := _FORMS.get(func)) is not None:
        return form(*args)
    if func.namespace == "aten" and torch.Tag.pointwise in func.tags:
        return _pointwise(func, args)
    return None


_PRECISIONS: dict[Any, torch.dtype | None] = {}
"""Of the results of pointwise ops that ran, by op and kinds of its arguments.  None: the result is
not one contiguous tensor."""


def _pointwise(func: Any, args: Sequence[Any]) -> Any:
    """The largest argument has the sizes of the result, the kinds of all decide its precision."""
    tensors = [item for item in args if isinstance(item, Tensor)]
    whole = max(tensors, key=lambda tensor: (tensor.dim(), tensor.numel()), default=None)
    if whole is None or not whole.numel() or not all(_fits(tensor, whole) for tensor in tensors):
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    for item in args:
        if isinstance(item, (list, tuple)):
            return None
        number = isinstance(item, (bool, int, float))
        known = (item.dtype, not item.dim()) if isinstance(item, Tensor) else item
        key.append(type(item) if number else known)
    shape, strides = tuple(whole.shape), whole.stride()
    if (kinds := tuple(key)) not in _PRECISIONS:
        out = _run(func, args, {})
        same = isinstance(out, Tensor) and out.shape == whole.shape and out.stride() == strides
        _PRECISIONS[kinds] = out.dtype if same else None
    dtype = _PRECISIONS[kinds]
    return None if dtype is None else (Tensor, ((shape, strides, dtype),))


def _fits(tensor: Tensor, whole: Tensor) -> bool:
    """Whether a contiguous tensor is broadcast to the size of another, or has it."""
    shape = tensor.shape
    if tensor.stride() != Value.contiguous(shape):
        return False
    ends = whole.shape[whole.dim() - len(shape) :]
    return shape == ends or all(size in (1, other) for size, other in zip(shape, ends, strict=True))


def _one(size: tuple[int, ...], dtype: torch.dtype) -> Any:
    return Tensor, ((size, Value.contiguous(size), dtype),)


def _product(rank: int, a: Tensor, b: Tensor) -> Any:
    """a[..., M, K] x b[..., K, N], both of so many dimensions, of any strides."""
    fits = a.dim() == b.dim() == rank
    fits = fits and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    return _one((*a.shape[:-1], b.shape[-1]), a.dtype) if fits and a.dtype == b.dtype else None


def _sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Any:
    """bias + a[M, K] x b[K, N]."""
    made = _product(2, a, b)
    if made is None or bias.dtype != a.dtype or bias.dim() > 2:
        return None
    ends = (a.shape[0], b.shape[1])[2 - bias.dim() :]
    fits = all(size in (1, other) for size, other in zip(bias.shape, ends, strict=True))
    return made if fits else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors of one precision and without a dimension of size 1, whose layout is no question."""
    if not tensors:
        return None
    first, size = tensors[0], list(tensors[0].shape)
    if not -len(size) <= dim < len(size):
        return None
    size[dim] = sum(tensor.shape[dim] for tensor in tensors if tensor.dim() == len(size))
    for tensor in tensors:
        alone = list(tensor.shape)
        if tensor.dtype != first.dtype or len(alone) != len(size) or min(alone) < 2:
            return None
        if tensor.stride() != Value.contiguous(alone):
            return None
        alone[dim] = size[dim]
        if alone != size:
            return None
    return _one(tuple(size), first.dtype)


def _layer_norm(x: Tensor, size: Sequence[int], weight: Any, bias: Any, _: float) -> Any:
    """x[..., *size]; the mean and 1 / deviation of each row."""
    weights = [tensor for tensor in (weight, bias) if tensor is not None]
    return _normed(x, weights, size, _rows(x, size), _statistic(x)) if _rows(x, size) else None


def _layer_norm_backward(grad: Tensor, x: Tensor, size: Sequence[int], *rest: Any) -> Any:
    """The gradients of x[..., *size], and those of weight and bias where they are wanted."""
    mean, deviation, weight, bias, wanted = rest
    rows = _rows(x, size)
    if not _plain((grad, x), x.shape, x) or not _plain((weight, bias), size, x):
        return None
    if not rows or not _plain((mean, deviation), rows, x):
        return None
    all_of = ((tuple(t.shape), t.stride(), t.dtype) for t in (x, weight, bias))
    return tuple, tuple(look if want else None for look, want in zip(all_of, wanted, strict=True))


def _rows(x: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """The shape of a number for each row of x[..., *size]; () where x has no such rows."""
    before = x.dim() - len(size)
    ends = before >= 0 and len(size) > 0 and tuple(x.shape[before:]) == tuple(size)
    return (*x.shape[:before], *(1 for _ in size)) if ends else ()


def _statistic(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, *_: Any) -> Any:
    """x[N, C, ...]; the mean and 1 / deviation of each channel are in fp32 for a half."""
    size = x.shape[1:2]
    many = x.numel() > sum(size)  # the variance of one element is refused
    weights = (weight, bias, mean, variance) if many else (None,)
    return _normed(x, weights, size, size, _statistic(x))


def _group_norm(
    x: Tensor, weight: Any, bias: Any, batch: int, channels: int, _: int, groups: int, eps: float
) -> Any:
    """x[N, C, ...]; the mean and 1 / deviation of each group."""
    fits = x.shape[:2] == (batch, channels) and groups > 0 and channels % groups == 0
    weights = (weight, bias) if fits else (None,)
    return _normed(x, weights, (channels,), (batch, groups), x.dtype)


def _normed(
    x: Tensor, weights: Sequence[Any], size: Sequence[int], stats: Sequence[int], dtype: torch.dtype
) -> Any:
    """The recipe of a norm.  weights: tensors of this size, all there; stats: the shape of two."""
    if not _plain((x,), x.shape, x) or not _plain(weights, size, x):
        return None
    each = tuple(stats), Value.contiguous(stats), dtype
    return tuple, ((tuple(x.shape), x.stride(), x.dtype), each, each)


def _batch_norm_backward(grad: Tensor, x: Tensor, weight: Any, *rest: Any) -> Any:
    """The gradients of x[N, C, ...], and those of weight and bias where they are wanted."""
    *small, _, _, wanted = rest
    if not _plain((grad, x), x.shape, x) or not _plain((weight, *small), x.shape[1:2], x):
        return None
    like, bias = ((tuple(t.shape), t.stride(), t.dtype) for t in (x, weight))
    return tuple, (like, *(bias if want else None for want in wanted[1:]))


def _plain(tensors: Sequence[Any], size: Sequence[int], x: Tensor) -> bool:
    """Whether tensors are there, of this size, contiguous, and as precise as x or in fp32."""
    return all(
        tensor is not None
        and tuple(tensor.shape) == tuple(size)
        and tensor.dtype in (x.dtype, torch.float32)
        and tensor.dtype.is_floating_point
        and tensor.numel() > 0
        and tensor.stride() == Value.contiguous(size)
        for tensor in tensors
    )


_aten: Any = torch.ops.aten
_FORMS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: partial(_product, 2),
    _aten.bmm.default: partial(_product, 3),
    _aten.addmm.default: _sum_and_product,
    _aten.cat.default: _cat,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_group_norm.default: _group_norm,
}
