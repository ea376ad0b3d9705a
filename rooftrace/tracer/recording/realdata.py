"""Values that code asks for, computed from real tensors, and tests for inf and nan."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import ops, taperecords
from rooftrace.tracer.recording.ops import written_nodes
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.recording.taperecords import META_KEY
from rooftrace.tracer.repeats import RepeatedCall
from rooftrace.tracer.values import trees

# -- finite numbers --------------------------------------------------------------------------------
# The result of a test for inf and nan on finite numbers, from the ops that compute it.
#
# A test that uses any other op is not recognised.

_SAME = {"aten.eq.Tensor": True, "aten.ne.Tensor": False}
"""Results for a finite number and itself: nan alone differs."""
_INFINITE = {"aten.ne.Scalar": True, "aten.eq.Scalar": False}
"""Results for a finite number and infinity."""
_BELOW = {
    "aten.lt.Scalar": True,
    "aten.le.Scalar": True,
    "aten.gt.Scalar": False,
    "aten.ge.Scalar": False,
}
"""Results for a finite number and infinity; the opposite for minus infinity."""
_TESTS = {"aten.isfinite": True, "aten.isnan": False, "aten.isinf": False}
_BOTH = ("aten.mul", "aten.logical_and", "aten.bitwise_and")
_EITHER = ("aten.logical_or", "aten.bitwise_or")
_NOT = ("aten.logical_not", "aten.bitwise_not")
_KEEPS = frozenset(
    f"aten.{name}"
    for name in (
        "all",
        "any",
        "_is_all_true",
        "_is_any_true",
        "view",
        "reshape",
        "_to_copy",
        "clone",
        "alias",
        "detach",
        "stack",
    )
)


def of_finite_numbers(node: fx.Node, depth: int = 16) -> bool | None:
    """The result of a test for inf and nan (isfinite, isnan and logic on them) on finite numbers.

    None where a recorded op is not part of such a test.
    """
    target: Any = node.target
    if not isinstance(target, torch_private.OpOverload) or not node.args or not depth:
        return None
    name = f"{target.namespace}.{target._opname}"
    first, second = node.args[0], node.args[1] if len(node.args) > 1 else None
    if name in _TESTS:
        return _TESTS[name]
    if str(target) in _SAME and first is second:
        return _SAME[str(target)]
    if str(target) in _INFINITE and isinstance(second, float) and math.isinf(second):
        return _INFINITE[str(target)]
    if str(target) in _BELOW and isinstance(second, float) and math.isinf(second):
        return _BELOW[str(target)] == (second > 0)
    parts = (first, second) if name in _BOTH + _EITHER else (first,)
    if name not in _KEEPS and name not in _NOT and name not in _BOTH + _EITHER:
        return None
    if isinstance(first, (list, tuple)):
        parts = tuple(first)
    truths = [of_finite_numbers(p, depth - 1) if isinstance(p, fx.Node) else None for p in parts]
    if not truths or None in truths:
        return None
    if name in _NOT:
        return not truths[0]
    some = name in _EITHER or name in ("aten.any", "aten._is_any_true")
    return any(truths) if some else all(truths)


# -- realdata --------------------------------------------------------------------------------------
# Values that code asks for, computed from the real tensors that the caller gave.
#
# A module with real weights, called with real inputs, is traced on meta copies of them.  Where
# its code asks for a value (`.item()`, a mask, the experts of a token), the recorded ops that
# make it, and no others, are run on the real tensors.  Ops that write in place run in their
# order, on copies. Results are kept, so a value inside a loop is not computed from the start
# again.
#
# A value cannot be computed if it depends on random numbers, an assumption, a tensor without data
# or a shortened loop, or if the ops would exceed the limits below, which hold for one capture.

MAX_FLOP = 2 * 10**10
"""The most FLOP of matrix products for values of one capture: about a second on a CPU."""
MAX_BYTES = 10**9
"""The most bytes that these ops may make; they are held until the capture ends."""
MAX_OPS = 20_000
"""The most ops that may run for values of one capture."""
_FACTORISATIONS = frozenset(
    {
        "aten.linalg_cholesky_ex",
        "aten.cholesky_inverse",
        "aten.linalg_inv_ex",
        "aten.linalg_lu_factor_ex",
        "aten.linalg_ldl_factor_ex",
        "aten.linalg_solve_triangular",
        "aten._linalg_solve_ex",
        "aten._linalg_det",
        "aten._linalg_slogdet",
        "aten._linalg_eigh",
        "aten._linalg_svd",
        "aten.linalg_eig",
        "aten.linalg_lu",
        "aten.linalg_lstsq",
        "aten.linalg_qr",
    }
)
"""Ops whose FLOP per element are about the width of the matrix."""
_MAX_RESTARTS = 8
"""The most times that all values are computed afresh, to get an earlier state of a tensor."""

_CPU = torch.device("cpu")


class _NotComputableError(Exception):
    """This value cannot be computed from real data alone, or costs too much."""


class _StaleError(Exception):
    """A kept result was overwritten since: it has to be computed afresh."""


class RealData:
    """Runs recorded ops of one capture on real tensors when code asks for their values."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._leaves = tape.entries.leaves.tensors
        self._kept = tape.entries.leaves.computed
        self._copied: set[int] = set()  # storages of leaves that something writes to
        self._places: dict[fx.Node, int] = {}
        self._writers: dict[int, list[fx.Node]] = defaultdict(list)
        self._last_write: dict[int, int] = {}
        self._flop = self._bytes = self._ops = self._restarts = 0

    def forget(self) -> None:
        """Free the kept results."""
        self._places.clear()
        self._writers.clear()

    def value(self, tensor: Tensor) -> Tensor | None:
        """The value of a recorded tensor; None where it cannot be computed."""
        made = self._tape.tags.made_by(tensor)
        if made is None or not self._leaves or torch_private.peek_interpreter_stack():
            return None
        node, index, spec = made
        try:
            result = self._of(node)
        except _NotComputableError:
            return None
        result = result if index is None else result[index]
        if tuple(result.shape) != spec.shape or result.dtype != spec.dtype:
            return None
        with torch_private.disable_current_modes(), torch_private.DisableTorchFunction():
            return result.detach().clone()  # type: ignore[no-any-return]

    def _of(self, node: fx.Node) -> Any:
        while True:
            try:
                self._look()
                order = self._needed(node)
                self._afford(order)
                self._run(order)
                return self._get(node)
            except _StaleError:
                self._restarts += 1
                if self._restarts > _MAX_RESTARTS:
                    raise _NotComputableError from None
                self._kept.clear()
                self._last_write.clear()

    # -- which ops make a value --------------------------------------------------------------------

    def _look(self) -> None:
        """Take note of the ops that were recorded since the last time."""
        nodes = self._tape.graph.nodes
        new = []
        for node in reversed(nodes):
            if node in self._places:
                break
            new.append(node)
        for node in reversed(new):
            self._places[node] = len(self._places)
            for storage in self._written(node):
                self._writers[storage].append(node)

    def _written(self, node: fx.Node) -> list[int]:
        return [self._storage(item) for item in written_nodes(node)]

    def _storage(self, node: fx.Node) -> int:
        base, index = taperecords.picked(node)
        item = base.meta[META_KEY]
        if isinstance(item, RepeatedCall):
            return item.storage(item.block.made[index or 0][2])
        if hasattr(item, "spec"):
            return int(item.spec.storage)
        return int(item.specs[index or 0].storage)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """The ops to run, in order: that make a value, and that wrote to it since."""
        needed: set[fx.Node] = set()
        waiting = [taperecords.picked(node)[0], *self._writers.get(self._storage(node), ())]
        while waiting:
            item = waiting.pop()
            if item in needed or item in self._kept:
                continue
            if item.op != "call_function" and item not in self._leaves:
                raise _NotComputableError  # a tensor without data: nothing else needs a look
            needed.add(item)
            place = self._places[item]
            for read in item.all_input_nodes:
                waiting.append(taperecords.picked(read)[0])
                storage = self._storage(read)
                if self._last_write.get(storage, -1) > place:
                    raise _StaleError
                for writer in self._writers.get(storage, ()):
                    if self._places[writer] < place:
                        waiting.append(writer)
            if len(needed) > MAX_OPS:
                raise _NotComputableError
        for item in needed:
            for storage in self._written(item):
                if storage not in self._copied:
                    self._copied.add(storage)
                    if any(self._storage(leaf) == storage for leaf in self._leaves):
                        raise _StaleError
        return sorted(needed, key=self._places.__getitem__)

    # -- cost --------------------------------------------------------------------------------------

    def _afford(self, order: Sequence[fx.Node]) -> None:
        flop = size = ran = 0
        for node in _written_out(order):
            if node.op != "call_function":
                if node not in self._leaves:
                    raise _NotComputableError
                leaf, version = self._leaves[node]
                if not leaf.is_inference() and leaf._version != version:
                    raise _NotComputableError  # the code has written to it on the host
                continue
            if node.target is operator.getitem:
                continue
            recorded = node.meta[META_KEY]
            self._check(node, recorded)
            ran += 1
            if not recorded.view:
                size += sum(_elements(s) * s.dtype.itemsize for s in recorded.specs)
            flop += _flop(node, recorded)
        self._flop, self._bytes, self._ops = self._flop + flop, self._bytes + size, self._ops + ran
        if self._flop > MAX_FLOP or self._bytes > MAX_BYTES or self._ops > MAX_OPS:
            self._flop, self._bytes, self._ops = self._flop - flop, self._bytes - size, self._ops
            raise _NotComputableError

    def _check(self, node: fx.Node, recorded: Any) -> None:
        """Raise if an op's result does not follow from its arguments as they were recorded."""
        target: Any = node.target
        name = f"{target.namespace}.{target._opname}"
        loop = recorded.origin.loop
        if (
            recorded.taint
            or "fallback" in recorded.facts
            or ops.is_random(target)
            or (name == "rooftrace.attention" and node.args[4])
            or (loop is not None and self._tape.rolling.is_short(loop[0]))
        ):
            raise _NotComputableError

    # -- running them ------------------------------------------------------------------------------

    def _run(self, order: Sequence[fx.Node]) -> None:
        with (
            torch_private.disable_current_modes(),
            torch_private.DisableTorchFunction(),
            torch_private.DisableAutocast(),
            torch.no_grad(),
        ):
            for node in order:
                if node.op != "call_function":
                    leaf = self._leaves[node][0].detach()
                    if self._storage(node) in self._copied:
                        leaf = leaf.clone()
                    self._kept[node] = leaf
                elif isinstance(node.meta[META_KEY], RepeatedCall):
                    self._kept[node] = self._repeat(node, self._get)
                else:
                    self._kept[node] = self._call(node, self._get)
                    for storage in self._written(node):
                        self._last_write[storage] = self._places[node]

    def _get(self, node: fx.Node) -> Any:
        base, index = taperecords.picked(node)
        return self._kept[base] if index is None else self._kept[base][index]

    def _repeat(self, node: fx.Node, get: Callable[[fx.Node], Any]) -> list[Any]:
        """The result of a call that repeats a block: its ops, run on the tensors of the call."""
        block = node.meta[META_KEY].block
        made: dict[fx.Node, Any] = {
            inner: get(outer)  # type: ignore[arg-type]
            for inner, outer in zip(block.inputs, node.args, strict=True)
        }

        def inside(item: fx.Node) -> Any:
            if item in made:
                return made[item]
            base, index = taperecords.picked(item)
            return made[base] if index is None else made[base][index]

        for item in block.nodes:
            if item.target is not operator.getitem:
                repeats = isinstance(item.meta[META_KEY], RepeatedCall)
                made[item] = self._repeat(item, inside) if repeats else self._call(item, inside)
        return [made[n] if index is None else made[n][index] for n, index, _ in block.made]

    def _call(self, node: fx.Node, get: Callable[[fx.Node], Any]) -> Any:
        def real(item: Any) -> Any:
            if isinstance(item, fx.Node):
                return get(item)
            if isinstance(item, (list, tuple)):
                return [real(x) for x in item]
            return _CPU if isinstance(item, torch.device) else item

        args = [real(item) for item in node.args]
        kwargs = {name: real(item) for name, item in node.kwargs.items()}
        target: Any = node.target
        try:
            result = ops.run_on_cpu(f"{target.namespace}.{target._opname}", target, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
            raise _NotComputableError from error
        if result is None:  # the written tensors are its result
            result = [get(item) for item in written_nodes(node)]
        specs = node.meta[META_KEY].specs
        for output, spec in zip(trees.listed(result), specs, strict=False):
            if tuple(output.shape) != spec.shape:
                raise _NotComputableError
        return result


def _written_out(order: Sequence[fx.Node]) -> list[fx.Node]:
    """Ops in order, with the ops of blocks in place of the calls that repeat them."""
    result: list[fx.Node] = []
    for node in order:
        item = node.meta.get(META_KEY)
        result += _written_out(item.block.nodes) if isinstance(item, RepeatedCall) else [node]
    return result


def _elements(spec: Any) -> int:
    sizes = zip(spec.shape, spec.stride, strict=True)
    return math.prod(size if step or not size else 1 for size, step in sizes)


def _flop(node: fx.Node, recorded: Any) -> int:
    """FLOP of an op by torch's formulas; of any other, one for each element that it makes."""
    target: Any = node.target
    formula = flop_registry.get(target.overloadpacket)
    shapes = [torch.Size(spec.shape) for spec in recorded.specs]
    if formula is not None:
        args = torch_private.tree_map_only(fx.Node, _shape, (node.args, dict(node.kwargs)))
        try:
            return int(
                formula(*args[0], **args[1], out_val=shapes[0] if len(shapes) == 1 else shapes)
            )
        except (AssertionError, TypeError, ValueError, IndexError, AttributeError, RuntimeError):
            pass  # torch's formula refuses these shapes
    made = 0 if recorded.view else sum(map(_elements, recorded.specs))
    if f"{target.namespace}.{target._opname}" in _FACTORISATIONS:
        made *= max((shape[-1] for shape in shapes if shape), default=1)
    return made


def _shape(node: fx.Node) -> torch.Size:
    base, index = taperecords.picked(node)
    item = base.meta[META_KEY]
    if isinstance(item, RepeatedCall):
        return torch.Size(item.block.results[index or 0][2].shape)
    spec = item.spec if hasattr(item, "spec") else item.specs[index or 0]
    return torch.Size(spec.shape)
