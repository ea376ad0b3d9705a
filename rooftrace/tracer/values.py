"""Small values that are known while tracing on meta, and what is assumed where they are not.

Positions, masks, lengths and indices are computed beside the meta tensors on the CPU, so that
`.item()`, `.tolist()`, boolean indexing and `nonzero` on them are exact.  Where a value depends on
weights or activations a named policy takes one and records an :class:`Assumption`.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.graph import Assumption

META = torch.device("meta")

MAX_INTEGERS = 1 << 22
"""Integer and boolean tensors up to this many elements are carried along."""
MAX_FLOATS = 1 << 16
"""Floating tensors up to this many elements: they seldom decide anything."""

MAX_SAME_BRANCH = 256
"""How often in a row one place may be told that an unknown condition is False: loops must end."""

KNOWN = "_rooftrace_known"
"""Attribute of a meta tensor whose value one running capture knows."""
REAL_VALUE = "_rooftrace_value"
"""Attribute of a meta tensor made from a small real one: its value, for a capture to learn."""

RANDOM = frozenset({
    "aten.bernoulli", "aten.bernoulli_", "aten.uniform_", "aten.normal_", "aten.rand", "aten.randn",
    "aten.native_dropout", "aten.multinomial", "aten.randint", "aten.randperm", "aten.rand_like",
    "aten.randn_like", "aten.randint_like", "aten.exponential_", "aten.random_", "aten.normal",
    "aten.cauchy_", "aten.geometric_", "aten.log_normal_", "aten.poisson", "aten.binomial"})
DRAWN = frozenset({"aten.randint", "aten.randperm"})
"""The random ops that make integers from nothing."""
UNINITIALISED = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
                           "aten.new_empty_strided", "aten.empty_permuted"})

ROUTING: Mapping[str, int] = {
    "aten.topk": 1, "aten.argmax": 0, "aten.argmin": 0, "aten.sort": 1, "aten.argsort": 0,
    "aten.multinomial": 0, "aten.max": 1, "aten.min": 1, "aten.kthvalue": 1, "aten.bucketize": 0,
    "aten.searchsorted": 0, "aten.cummax": 1, "aten.cummin": 1}
"""Ops that turn floats into indices, with the position of the index output."""


class Known(NamedTuple):
    """The value of a meta tensor: a CPU tensor, the assumptions it rests on, and its storage's epoch."""

    value: Tensor
    taint: frozenset[int]
    epoch: int


class UnknownValueError(RuntimeError):
    """Code asked for a value that is neither known nor small enough to assume."""


def small(tensor: Tensor) -> bool:
    """Whether a tensor of this size is worth carrying."""
    limit = MAX_FLOATS if tensor.dtype.is_floating_point or tensor.dtype.is_complex else MAX_INTEGERS
    return tensor.numel() <= limit


class Values:
    """What is known of the meta tensors of one capture.

    where: gives the current module path.  branches: answers to unknown conditions by number.
    density: share of an unknown mask that is taken as true.  draws: random integers are drawn with a
    fixed seed (while a user's function makes inputs) instead of being unknown.
    """

    def __init__(self, where: Callable[[], str] = lambda: "",
                 branches: Mapping[int, bool] | None = None, density: float = 0.5,
                 draws: bool = False) -> None:
        self.where = where
        self.branches = dict(branches or {})
        self.density = density
        self._generator = torch.Generator().manual_seed(0) if draws else None
        self._same_branch: Counter[tuple[str, str]] = Counter()
        self.assumptions: list[Assumption] = []
        self.decisions = 0
        self._epochs: dict[int, int] = {}
        self._memo: dict[Any, Any] = {}
        self._index: dict[tuple[Any, ...], int] = {}
        self._alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    # -- knowing ---------------------------------------------------------------------------------

    def learn(self, tensor: Tensor, value: Tensor, taint: frozenset[int] = frozenset()) -> None:
        """Remember that `tensor` holds `value` (a CPU tensor of its shape)."""
        tensor.__dict__[KNOWN] = Known(value, taint, self._epochs.get(_key(tensor), 0))
        self._alive[id(tensor)] = tensor

    def known(self, tensor: Tensor) -> Known | None:
        """The value of `tensor` if it is known and its storage was not overwritten since."""
        entry: Known | None = tensor.__dict__.get(KNOWN)
        if entry is None:
            return None
        if entry.epoch != self._epochs.get(_key(tensor), 0):
            return None
        return entry

    def forget(self, tensor: Tensor) -> None:
        """`tensor` was overwritten with something unknown: it and its views are unknown now."""
        tensor.__dict__.pop(KNOWN, None)
        key = _key(tensor)
        self._epochs[key] = self._epochs.get(key, 0) + 1

    def close(self) -> None:
        """Take what is known off the tensors that outlive this capture.

        What rests on no assumption stays as a `REAL_VALUE`, for a later capture to learn.
        """
        for tensor in list(self._alive.values()):
            entry = self.known(tensor)
            if entry is not None and not entry.taint:
                tensor.__dict__[REAL_VALUE] = entry.value
            tensor.__dict__.pop(KNOWN, None)
        self._alive.clear()

    # -- assuming --------------------------------------------------------------------------------

    def assume(self, kind: str, text: str, value: Any = None) -> int:
        """Record an assumption (once per kind, module and text) and return its id."""
        where = self.where()
        key = (kind, where, text, repr(value))
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.assumptions)
            self.assumptions.append(Assumption(index, kind, where, text, value))
        return index

    def value_of(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """The value of `tensor`: exact where known, otherwise by policy.

        Raises UnknownValueError for an unknown tensor too large to assume.
        """
        entry = self.known(tensor)
        if entry is not None:
            return entry.value, entry.taint
        if tensor.device.type == "cpu":
            return tensor.detach(), frozenset()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool and tensor.numel() == 1:
            return self._branch(shape, why)
        if tensor.numel() > MAX_INTEGERS:
            raise UnknownValueError(
                f"{why} needs the value of a {_label(tensor)}, which depends on weights or activations")
        if tensor.dtype == torch.bool:
            count = max(1, math.ceil(tensor.numel() * self.density))
            flat = torch.zeros(tensor.numel(), dtype=torch.bool)
            flat[:count] = True
            taint = self.assume("density", f"{why}: {self.density:.0%} of an unknown mask "
                                           f"{list(shape)} is taken as true", self.density)
            return flat.reshape(shape), frozenset([taint])
        taint = self.assume("value", f"{why}: an unknown {_label(tensor)} is taken as ones", 1)
        return torch.ones(shape, dtype=tensor.dtype), frozenset([taint])

    def _branch(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """An unknown condition is False, unless its number is in `branches`, or a loop waits for it."""
        index, self.decisions = self.decisions, self.decisions + 1
        place = (self.where(), why)
        endless = self._same_branch[place] >= MAX_SAME_BRANCH
        taken = self.branches.get(index, endless)
        self._same_branch[place] = 0 if taken else self._same_branch[place] + 1
        text = f"{why} of an unknown condition is taken as {taken}"
        taint = self.assume("branch", f"{text} after {MAX_SAME_BRANCH} times" if endless else text, taken)
        return torch.full(shape, taken), frozenset([taint])

    def route(self, name: str, source: Tensor, index: Tensor, dimension: int) -> int | None:
        """Give the index output of topk, argmax, sort ... on unknown floats balanced values.

        Every class is chosen equally often (round robin); a full sort keeps the order.  Returns the
        id of the assumption.
        """
        if not 0 < index.numel() <= MAX_INTEGERS:
            return None
        classes = source.shape[dimension] if source.dim() else 1
        shape = tuple(index.shape)
        full = shape == tuple(source.shape) and "sort" in name
        key = ("route", full, shape, classes, index.dtype, dimension)
        value = self._memo.get(key)
        if value is None:
            if full:
                spread = [-1 if i == dimension % source.dim() else 1 for i in range(source.dim())]
                value = torch.arange(classes).reshape(spread).expand(shape).contiguous()
            else:
                value = (torch.arange(index.numel()) % max(classes, 1)).reshape(shape)
            value = self._memo[key] = value.to(index.dtype)
        taint = self.assume("balanced-routing", f"{name} over {classes} classes on unknown scores chooses "
                                                f"each equally often", classes)
        self.learn(index, value, frozenset([taint]))
        return taint

    # -- propagating -----------------------------------------------------------------------------

    def propagate(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                  tensors: Sequence[Tensor], outputs: Sequence[Tensor], mutated: Sequence[Tensor],
                  ) -> frozenset[int] | None:
        """Compute `func` on known values too, and learn its outputs.  Returns the taint, None if unknown."""
        entries = []
        for tensor in tensors:
            entry = self.known(tensor)
            if entry is None:
                if tensor.device.type == "cpu" and small(tensor):
                    entries.append(Known(tensor, frozenset(), 0))
                    continue
                for changed in mutated:
                    self.forget(changed)
                return None
            entries.append(entry)
        drawn = name in DRAWN and self._generator is not None
        if (name in RANDOM and not drawn) or not all(small(o) for o in outputs):
            for changed in mutated:
                self.forget(changed)
            return None
        taint: frozenset[int] = frozenset().union(*(e.taint for e in entries))
        by_id = {id(t): e.value for t, e in zip(tensors, entries, strict=True)}
        result = self._compute(name, func, args, kwargs, by_id, bool(mutated))
        if result is None:
            for changed in mutated:
                self.forget(changed)
            return None
        values = _tensors(result)
        for output, value in zip(outputs, values, strict=False):
            self.learn(output, value, taint)
        return taint

    def _compute(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
                 by_id: Mapping[int, Tensor], mutates: bool) -> Any:
        def swap(item: Any) -> Any:
            if isinstance(item, Tensor):
                return by_id[id(item)]
            if isinstance(item, (list, tuple)):
                return [swap(x) for x in item]
            if isinstance(item, torch.device):
                return torch.device("cpu")
            return item

        new_args = [swap(a) for a in args]
        new_kwargs = {k: swap(v) for k, v in kwargs.items()}
        key = None
        if not mutates and by_id:
            inputs = tuple(by_id.values())
            key = (func, tuple((id(t), t._version) for t in inputs),
                   repr([a if not isinstance(a, Tensor) else None for a in _flat(new_args)]),
                   repr({k: v if not isinstance(v, Tensor) else None for k, v in new_kwargs.items()}))
            hit = self._memo.get(key)
            if hit is not None and all(t._version == v for t, v in hit[1]):
                return hit[0]
        if name == "aten.histc":
            # CUDA counts integers, the CPU kernel only floats; the counts are the same.
            new_args[0], dtype = new_args[0].double(), new_args[0].dtype
        if name in DRAWN:
            key, func = None, getattr(torch, name.removeprefix("aten."))
            new_kwargs = {**new_kwargs, "generator": self._generator, "device": "cpu"}
        try:
            result = func(*new_args, **new_kwargs)
            if name == "aten.histc":
                result = result.to(dtype)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return None  # a value that cannot be computed is an unknown value
        if name in UNINITIALISED:
            result.zero_()
        if key is not None:
            # The inputs are kept so that their ids stay theirs.
            self._memo[key] = (result, [(t, t._version) for t in _tensors(result)], inputs)
        return result


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _label(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} tensor"


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [t for item in result for t in _tensors(item)]
    return []


def _flat(items: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for item in items:
        if isinstance(item, (list, tuple)):
            flat.extend(_flat(item))
        else:
            flat.append(item)
    return flat

