"""Substitutes for ops without a meta kernel, and repeatable random numbers on the host."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rooftrace import _processes
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.recording.overrides import original_of, replaced
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.torch_private import tree_map_only
from rooftrace.tracer.values import META, masks, trees

# -- random numbers --------------------------------------------------------------------------------
# Random numbers that the traced code draws on the host: the same in every trace.
#
# A generator that belongs to the process is seeded and restored only where no other thread could
# draw from it meanwhile.  Otherwise a recording's threads draw from its generators.

_SEED = 0


@contextlib.contextmanager
def draws_repeated(tape: Tape) -> Iterator[None]:
    """Inside, random numbers that the code draws on the host are the same every time.

    At the end the process's generators are as if nothing had been drawn inside.
    """
    if _processes.alone():
        with _seeded():
            yield
    else:
        with _apart(tape):
            yield


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The generators of the process, seeded and restored."""
    with overrides.draws_undone():
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(_SEED)
        yield


@contextlib.contextmanager
def _apart(tape: Tape) -> Iterator[None]:
    """Generators of this recording, for its threads.

    A C function that the code has imported by its name (`from random import random`) still draws
    from the process's generator.
    """
    generators = _RecordingGenerators()
    before, tape.generators = tape.generators, generators
    try:
        with contextlib.ExitStack() as undo:
            for home, replacements in generators.replacements():
                undo.enter_context(replaced(home, replacements))
            yield
    finally:
        tape.generators = before


class _RecordingGenerators:
    """The generators of one recording: Python's, torch's for the host, and numpy's."""

    def __init__(self) -> None:
        self._torch = torch.Generator()
        self._torch.manual_seed(_SEED)
        self._python = random.Random(_SEED)
        self._modules: Any = sys.modules.get("numpy.random")
        self._numpy: Any = self._modules and self._modules.RandomState(_SEED)

    def replacements(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Replacements of the functions that draw from the process's generators."""
        source = self._torch
        seeds: dict[str, Any] = {
            "manual_seed": lambda seed: source.manual_seed(int(seed)),
            "seed": source.seed,
            "initial_seed": source.initial_seed,
            "get_rng_state": source.get_state,
            "set_rng_state": source.set_state,
        }
        yield torch, seeds
        yield torch.random, seeds
        for home, kind, state in (
            (random, random.Random, self._python),
            (self._modules, getattr(self._modules, "RandomState", None), self._numpy),
        ):
            if home is not None and kind is not None:
                yield home, {name: getattr(state, name) for name in _names_of_methods(home, kind)}

    def states(self) -> Any:
        """The states of the generators: equal only if nothing was drawn between.

        The process's generator of numpy counts too: its functions may be imported by their names,
        and are not seen.  Of Python's functions that is seen (see `replay/outside`).
        """
        numpy = []
        if self._numpy is not None:
            for read in (self._numpy.get_state, original_of(self._modules, "get_state")):
                state = read()
                numpy.append((state[1].tobytes(), *state[2:]))
        return self._python.getstate(), self._torch.get_state().numpy().tobytes(), numpy

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the host that draws from the generator of the process: from ours instead."""
        ours, default = self._torch, torch.default_generator
        if kwargs.get("generator") not in (None, default):
            return func(*args, **kwargs)
        takes = _with_generator(func)
        if takes is not None:
            return takes(*args, **{**kwargs, "generator": ours})
        before = default.get_state()
        default.set_state(ours.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            ours.set_state(default.get_state())
            default.set_state(before)


@functools.cache
def _names_of_methods(home: Any, kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for name in list(vars(home))
        if hasattr(kind, name)
        and isinstance(getattr(original_of(home, name), "__self__", None), kind)
    )


@functools.cache
def _with_generator(func: Any) -> Callable[..., Any] | None:
    """The overload of an op that takes a generator and the same arguments; None: none does."""
    wanted = {argument.name for argument in func._schema.arguments} | {"generator"}
    packet = func._overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        if {argument.name for argument in overload._schema.arguments} == wanted:
            return overload  # type: ignore[no-any-return]
    return None


# -- substitutes -----------------------------------------------------------------------------------
# Substitutes for ops that have no meta kernel, or whose kernel refuses calls that devices run.

_BF16_ONLY = frozenset({"aten._grouped_mm", "aten._scaled_grouped_mm"})
"""Products whose meta kernels support one precision only."""
_TYPED_SUMS = frozenset({"aten.addmm.dtype", "aten.baddbmm.dtype"})
"""Products with a type of the output, whose meta kernels multiply by it: addmm until torch 2.13."""
_MAX_ZEROS = 1 << 24
"""The most elements of inputs that are made for real to learn an op's output shape; of more, the
shape follows from two runs on fewer."""
_FEW = (33, 65)
"""The least size that stands for a larger one in each of these runs."""
_NO_FAKE = "no fake impl registered"
"""The text of torch's error for a custom op of Python without a shape function."""
_REFUSED = (NotImplementedError, RuntimeError, TypeError)


def off_host(tape: Tape, call: Call, out: Any) -> Any:
    """`out` on meta: some kernels (solve_triangular) return on the device of a stray CPU tensor."""
    if call.info.mutated or call.info.may_alias or "device" in call.kwargs:
        return out
    outputs = trees.listed(out)
    if len({t.device.type for t in call.tensors}) < 2 or any(t.device == META for t in outputs):
        return out
    return _with(call, lambda tensor: _off_host(tape, tensor)) if outputs else out


def _with(call: Call, change: Callable[[Tensor], Tensor]) -> Any:
    """The result of a call with its tensors changed."""
    args, kwargs = tree_map_only(Tensor, change, (tuple(call.args), dict(call.kwargs)))
    return call.func(*args, **kwargs)


def without_meta_kernel(tape: Tape, call: Call, error: Exception) -> Any:
    """The outputs of an op that meta refused.

    In order: the result of a GPU where only it has the op, stray CPU tensors to meta, a precision
    that meta knows, a decomposition, a run on CPU zeros,
    "writes in place", "like its first input".  Raises `error` where it was the user's.
    """
    for attempt in _attempts(tape, call, error):
        with contextlib.suppress(*_REFUSED):
            return attempt()
    if not isinstance(error, NotImplementedError) and _NO_FAKE not in str(error):
        raise error
    with contextlib.suppress(*_REFUSED):
        result = call.func.decompose(*call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
    return _assumed(tape, call, error)


def _attempts(tape: Tape, call: Call, error: Exception) -> Iterator[Callable[[], Any]]:
    """Ways to run an op that give its exact shapes; only applicable ones."""
    yield lambda: _on_a_gpu(call)
    if not call.tensors:  # C++ hands on a tensor of one number as the number
        yield lambda: call.func(*_as_tensors(call), **call.kwargs)
    if call.name == "aten._ctc_loss":
        yield lambda: _ctc_loss(tape, *call.args[:4])
    if call.func.namespace == "c10d":
        yield lambda: _to_wait_for(call)
    if {"cpu", "meta"} <= {t.device.type for t in call.tensors}:
        yield lambda: _with(call, lambda tensor: _off_host(tape, tensor))
    if call.name in _BF16_ONLY:
        yield lambda: _in_bf16(call)
    if str(call.func) in _TYPED_SUMS:
        yield lambda: _with_type(call.func, *call.args)
    if any(t.layout is not torch.strided for t in call.tensors):
        yield lambda: _as_dense(call)  # a sum or product has the sizes of the dense one
    if tape.packed and not call.info.mutated and isinstance(error, RuntimeError):
        yield lambda: _on_quantised(call)


def _as_tensors(call: Call) -> list[Any]:
    """The arguments of a call, with numbers as tensors where it wants tensors."""
    wanted = [of.type.kind() == "TensorType" for of in call.func._schema.arguments]
    return [
        torch.tensor(item) if wants and type(item) in (bool, int, float) else item
        for item, wants in zip(call.args, wanted, strict=False)
    ]


def _to_wait_for(call: Call) -> Any:
    """The work handle of a collective without a meta kernel: the one of a barrier of its group."""
    barrier: Any = torch.ops.c10d.barrier.default
    return barrier(torch.empty(1), call.named["process_group"], [], timeout=-1)


def _ctc_loss(tape: Tape, scores: Tensor, targets: Tensor, _: Any, lengths: Any) -> Any:
    """The loss [B] and log alpha [B, T, 2 longest target + 1] of scores[T, B, C] (LossCTC.cu).

    targets[B, S]; or of all rows one after the other, [sum of lengths].
    """
    steps, batch = scores.shape[:2]
    entry = tape.values.exact(lengths) if isinstance(lengths, Tensor) else None
    if entry is not None:
        longest = int(entry.value.max()) if batch else 0
    elif not isinstance(lengths, Tensor):
        longest = max(lengths, default=0)
    else:
        longest = targets.shape[-1] if targets.dim() > 1 else targets.numel() // max(batch, 1)
        tape.values.assume("lengths", f"the longest target of a CTC loss has {longest} symbols")
    return scores.new_empty((batch,)), scores.new_empty((batch, steps, 2 * longest + 1))


def _assumed(tape: Tape, call: Call, error: Exception) -> Any:
    """The outputs of an op of unknown shapes; the guess is recorded as an assumption."""
    values, name = tape.values, call.name
    if call.info.mutated:
        values.assume("shape", f"{name} has no meta kernel: taken as writing in place")
        written = call.written()
        return written[0] if call.func._schema.returns and written else None
    few = sum(t.numel() for t in call.tensors) <= _MAX_ZEROS
    with contextlib.suppress(*_REFUSED):
        result = _on_zeros(call) if few else _on_fewer_zeros(call)
        text = f"{name} has no meta kernel: its output shape is that of a run on zeros"
        values.assume("shape", text if few else f"{text} of fewer rows")
        return tree_map_only(Tensor, lambda t: torch.empty_like(t, device=META), result)
    if not call.tensors:
        raise error
    text = f"{name} has no meta kernel: its outputs are taken to be like its first input"
    values.assume("shape", text)
    returns = call.func._schema.returns
    results = tuple(torch.empty_like(call.tensors[0], device=META) for _ in returns)
    return results[0] if len(results) == 1 else results


def _on_zeros(call: Call, sizes: Mapping[int, int] = MappingProxyType({})) -> Any:
    """The result of an op on zeros.  sizes: others in place of its tensors' sizes."""
    return _with(
        call, lambda t: torch.zeros([sizes.get(size, size) for size in t.shape], dtype=t.dtype)
    )


def _on_fewer_zeros(call: Call) -> Any:
    """The result of an op on many elements, from two runs on few: a size that follows one of its
    inputs' takes that size, and one that is the same in both stays.

    Raises RuntimeError where a size follows none.
    """
    large = sorted({size for t in call.tensors for size in t.shape if size > min(_FEW)})
    fewer = [{size: start + 2 * n for n, size in enumerate(large)} for start in _FEW]
    runs = [_on_zeros(call, sizes) for sizes in fewer]
    following = {tuple(sizes[size] for sizes in fewer): size for size in large}
    others = iter(trees.listed(runs[1]))

    def widened(tensor: Tensor) -> Tensor:
        shape = []
        for ends in zip(tensor.shape, next(others).shape, strict=True):
            size = ends[0] if ends[0] == ends[1] else following.get(ends)
            if size is None:
                raise RuntimeError(f"{call.name}: a size is {ends[0]} and {ends[1]}")
            shape.append(size)
        return torch.empty(shape, dtype=tensor.dtype, device=META)

    return tree_map_only(Tensor, widened, runs[0])


def _off_host(tape: Tape, tensor: Tensor) -> Tensor:
    """A meta tensor for a CPU tensor that met meta tensors; the graph reads it as a constant."""
    if tensor.device.type != "cpu":
        return tensor
    moved = torch.empty_like(tensor, device=META)
    if tape.recording:
        tape.node_of(tensor)
        tape.tags.same_as(moved, tensor)
    if masks.small(tensor):
        tape.values.learn(moved, tensor.detach())
    return moved


def _on_quantised(call: Call) -> Any:
    """An op of floats (a mean, a pooling) on quantised values, which are their integers on meta."""
    stored = {t.dtype for t in call.tensors} & {torch.uint8, torch.int8}
    if len(stored) != 1:
        raise TypeError("no quantised values of one type")
    dtype = stored.pop()
    floats = _with(call, lambda t: t.float() if t.dtype == dtype else t)
    return tree_map_only(Tensor, lambda t: t.to(dtype), floats)


def _in_bf16(call: Call) -> Tensor:
    """A grouped product of another precision: devices run it, the meta kernel takes bf16 only."""
    product = _with(
        call,
        lambda t: torch.empty_like(t, dtype=torch.bfloat16) if t.is_floating_point() else t,
    )
    return torch.empty_like(product, dtype=call.args[0].dtype)


def _as_dense(call: Call) -> Any:
    """An op on dense tensors in place of sparse ones, if its result on sparse ones is dense too."""

    def dense(tensor: Tensor) -> Tensor:
        strided = tensor.layout is torch.strided
        return tensor if strided else torch.empty(tensor.shape, dtype=tensor.dtype, device=META)

    if all(t.layout is not torch.strided for t in call.tensors):
        raise NotImplementedError  # of sparse tensors alone it would be sparse
    return _with(call, dense)


def _with_type(func: Any, added: Tensor, first: Tensor, second: Tensor, dtype: Any) -> Tensor:
    """The sum of a tensor and a product, in the type of the argument."""
    plain = func.overloadpacket.default
    return torch.empty_like(
        plain(torch.empty_like(added, dtype=first.dtype), first, second), dtype=dtype
    )


# -- ops that only a GPU runs: of SyncBatchNorm, and CTC -------------------------------------------
# Statistics are in FP32 where the input is in a shorter type; the normalised one keeps its layout.

_SHORT = (torch.float16, torch.bfloat16)


def _on_a_gpu(call: Call) -> Any:
    """The outputs of an op on meta.  Raises NotImplementedError for an unknown op."""
    shapes = _SHAPES.get(call.name)
    if shapes is None:
        raise NotImplementedError(call.name)
    return shapes(*call.args, **call.kwargs)


def _per_channel(x: Tensor) -> Tensor:
    """C numbers of x[N, C, ...]."""
    dtype = torch.float32 if x.dtype in _SHORT else x.dtype
    return x.new_empty((x.shape[1],), dtype=dtype)


def _stats(x: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _per_channel(x), _per_channel(x)


def _reduced(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """The sums of dy and of dy (x - mean), and the gradients of weight and bias, by mask."""
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    wanted = (weight_g, bias_g)
    gradients = [None if weight is None or not w else torch.empty_like(weight) for w in wanted]
    return (*sums, *gradients)


_SHAPES: Mapping[str, Callable[..., Any]] = {
    "aten.batch_norm_stats": _stats,
    "aten.batch_norm_gather_stats": _stats,
    "aten.batch_norm_gather_stats_with_counts": _stats,
    "aten.batch_norm_elemt": lambda x, *others, **more: torch.empty_like(x),
    "aten.batch_norm_backward_reduce": _reduced,
    "aten.batch_norm_backward_elemt": lambda grad, x, *others, **more: torch.empty_like(x),
    "aten._ctc_loss_backward": lambda grad, x, *others, **more: torch.empty_like(
        x, memory_format=torch.contiguous_format
    ),
}
