"""Small values that are known while tracing on meta, and what is assumed where they are not.

Positions, masks, lengths and indices are computed beside the meta tensors on the CPU, so that
`.item()`, `.tolist()`, boolean indexing and `nonzero` on them are exact.  Where a value depends on
weights or activations a named policy takes one and records an :class:`Assumption`.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.asking import assumptions
from rooftrace.tracer.graph import Assumption
from rooftrace.tracer.recording.groups import is_collective
from rooftrace.tracer.recording.origin import asked_under_not, deciding_line
from rooftrace.tracer.tensors import bytes_of, listed

META = torch.device("meta")

MAX_INTEGERS = 1 << 22
"""Integer and boolean tensors up to this many elements are carried along."""
MAX_ASSUMED = 1 << 24
"""Unknown tensors up to this many elements are given a value where the code needs one."""
MAX_FLOATS = 1 << 16
"""Floating tensors up to this many elements: they seldom decide anything."""

MAX_SAME_BRANCH = 256
"""How often in a row one place may get the same answer to an unknown condition: loops must end."""

DENSITY = 0.5
"""The share of an unknown mask that is taken as true."""

KNOWN = "_rooftrace_known"
"""Attribute of a meta tensor whose value one running capture knows."""
REAL = "_rooftrace_real"
"""Attribute of a meta tensor made from a real one: that one, as a `Real`."""
REAL_VALUE = "_rooftrace_value"
"""Attribute of a meta tensor made from a small real one: its value, for a capture to learn."""

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


class Real:
    """A reference to the user's own tensor, which is only read; a copy of it is itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> Real:
        return self


class Known(NamedTuple):
    """The value of a meta tensor (on the CPU), the assumptions it rests on, its storage's epoch."""

    value: Tensor
    taint: frozenset[int]
    epoch: int


_NO_TAINT: frozenset[int] = frozenset()


class UnknownValueError(RuntimeError):
    """Code asked for a value that is neither known nor small enough to assume."""


def small(tensor: Tensor) -> bool:
    """Whether a tensor of this size is worth carrying."""
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MAX_FLOATS if inexact else MAX_INTEGERS)


DECIDING = {
    "aten.bitwise_and": False,
    "aten.logical_and": False,
    "aten.bitwise_or": True,
    "aten.logical_or": True,
}
"""Ops on truth values, and the value of one side that makes the other one's of no matter."""


class Values:
    """What is known of the meta tensors of one capture.

    where: gives the current module path.  branches: answers to unknown conditions by number.
    assume: what the user decided for unknown values, by kind and module.  draws: random integers
    are drawn with a fixed seed (while a user's function makes inputs) instead of being unknown.
    number: what an unknown number is taken as.  turned: source lines whose unknown conditions
    go the other way: there the code fails with the usual one.
    """

    def __init__(
        self,
        where: Callable[[], str] = lambda: "",
        branches: Mapping[int, bool] | None = None,
        assume: Mapping[str, Any] | None = None,
        draws: bool = False,
        number: int = 1,
        turned: Collection[str] = (),
    ) -> None:
        self.where = where
        self.op = ""  # the one that is being run
        self.branches = dict(branches or {})
        self.given = dict(assume or {})
        self.number = number
        self.turned = frozenset(turned)
        self.by_number = False  # the user's branches count conditions: none is computed
        self.last_line = ""  # the line that asked for the last unknown condition
        self._generator = torch.Generator().manual_seed(0) if draws else None
        self._same_branch: Counter[tuple[str, str]] = Counter()
        self.assumptions: list[Assumption] = []
        self.decisions = 0
        self.computed = 0  # how many values were computed from real data
        self.compute: Callable[[Tensor], Tensor | None] = lambda tensor: None
        """Gives the value of a tensor from the real tensors that were given, where it can."""
        self.finite: Callable[[Tensor], bool | None] = lambda tensor: None
        """Gives what a test for inf and nan says of finite numbers; None for what is no such."""
        self.decided = False  # the last of these decisions was the user's
        self._epochs: dict[int, int] = {}
        self._memo: dict[Any, Any] = {}
        self._shared: set[int] = set()  # storages of values that several tensors hold
        self._index: dict[tuple[Any, ...], int] = {}
        self._alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    # -- knowing ---------------------------------------------------------------------------------

    def learn(self, tensor: Tensor, value: Tensor, taint: frozenset[int] = frozenset()) -> None:
        """Remember that `tensor` holds `value` (a CPU tensor of its shape)."""
        tensor.__dict__[KNOWN] = Known(value, taint, self._epochs.get(bytes_of(tensor), 0))
        self._alive[id(tensor)] = tensor

    def tensors(self) -> list[Tensor]:
        """The meta tensors of which something is known."""
        return list(self._alive.values())

    def known(self, tensor: Tensor) -> Known | None:
        """The value of `tensor` if it is known and its storage was not overwritten since.

        A CPU tensor is its own value.
        """
        entry: Known | None = tensor.__dict__.get(KNOWN)
        if entry is None:
            if tensor.device.type == "cpu":
                return Known(tensor.detach(), _NO_TAINT, 0)
            return None
        if entry.epoch != self._epochs.get(bytes_of(tensor), 0):
            return None
        return entry

    def forget(self, tensor: Tensor) -> None:
        """`tensor` was overwritten with something unknown: it and its views are unknown now."""
        tensor.__dict__.pop(KNOWN, None)
        key = bytes_of(tensor)
        self._epochs[key] = self._epochs.get(key, 0) + 1

    def close(self, keep: bool = False) -> None:
        """Take what is known off the tensors that outlive this capture.

        keep: what rests on no assumption stays as a `REAL_VALUE`, for a later capture to learn.
        """
        for tensor in list(self._alive.values()):
            entry = self.known(tensor)
            if keep and entry is not None and not entry.taint:
                tensor.__dict__[REAL_VALUE] = entry.value
            tensor.__dict__.pop(KNOWN, None)
        self._alive.clear()

    def once(self, value: Tensor, what: Any, compute: Callable[[Tensor], Any]) -> Any:
        """`compute(value)`, done once for each known value and `what` (layers share their mask)."""
        if value.is_inference():
            return compute(value)
        key = ("once", id(value), value._version, what)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = (compute(value), value)
        return found[0]

    # -- assuming --------------------------------------------------------------------------------

    def assume(self, kind: str, text: str, value: Any = None) -> int:
        """Record an assumption (once per kind, module and text) and return its id."""
        return self._assume(kind, self.where(), text, value, self.op)

    def assume_again(self, number: int, path: str, other: str) -> int:
        """The id of an assumption made below one module path, for the module at another."""
        found = self.assumptions[number]
        inside = found.where == path or found.where.startswith(f"{path}.")
        where = other + found.where[len(path) :] if inside else found.where
        return self._assume(found.kind, where, found.text, found.value, found.op)

    def _assume(self, kind: str, where: str, text: str, value: Any, op: str) -> int:
        key = (kind, where, text, repr(value))
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.assumptions)
            self.assumptions.append(Assumption(index, kind, where, text, value, op))
        return index

    def value_of(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        """The value of `tensor`: exact where known, otherwise by policy.

        Raises UnknownValueError for an unknown tensor too large to assume.
        """
        entry = self.known(tensor)
        if entry is not None:
            return entry.value, entry.taint
        entry = self.from_data(tensor)
        if entry is not None:
            return entry.value, entry.taint
        shape = tuple(tensor.shape)
        single = tensor.dtype == torch.bool and tensor.numel() == 1
        if tensor.dtype == torch.bool and not (single and self.by_number):
            finite = self.finite(tensor)
            if finite is not None and self.decision("branch" if single else "density") is None:
                text = f"{why}: unknown numbers are taken as finite"
                return torch.full(shape, finite), frozenset([self.assume("finite", text, finite)])
        if single:
            return self._branch(shape, why)
        if tensor.numel() > MAX_ASSUMED:
            raise UnknownValueError(
                f"{why} needs the value of a {_label(tensor)}, "
                "which depends on weights or activations"
            )
        if tensor.dtype == torch.bool:
            return self._mask(shape, why)
        return self._ones(tensor, why)

    def from_data(self, tensor: Tensor) -> Known | None:
        """The value of an unknown tensor as the real tensors that were given make it.

        None where they do not, and where the user decided what is taken.
        """
        single = tensor.dtype == torch.bool and tensor.numel() == 1
        kind = "branch" if single else "density" if tensor.dtype == torch.bool else "value"
        if self.decision(kind) is not None or (single and self.by_number):
            return None
        value = self.compute(tensor)
        if value is None:
            return None
        self.computed += 1
        if tensor.device.type == "meta":
            self.learn(tensor, value)
        return Known(value, _NO_TAINT, 0)

    def decision(self, kind: str) -> Any:
        """What the user decided for this kind of assumption, here; None where nothing."""
        return assumptions.decided(self.given, kind, self.where()) if self.given else None

    def _mask(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """An unknown mask begins with its true elements; at least one, unless the user says 0."""
        decided = self.decision("density")
        density = DENSITY if decided is None else float(decided)
        flat = torch.zeros(math.prod(shape), dtype=torch.bool)
        flat[: max(1 if density else 0, math.ceil(flat.numel() * density))] = True
        text = f"{why}: {100 * density:.3g}% of an unknown mask {list(shape)} is taken as true"
        taint = self.assume("density", _as_given(text, decided), density)
        return flat.reshape(shape), frozenset([taint])

    def _ones(self, tensor: Tensor, why: str) -> tuple[Tensor, frozenset[int]]:
        decided = self.decision("value")
        value = self.number if decided is None else decided
        shown = str(value) if decided is not None else "ones" if value else "zeros"
        text = f"{why}: an unknown {_label(tensor)} is taken as {shown}"
        taint = self.assume("value", _as_given(text, decided), value)
        return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype), frozenset([taint])

    def _branch(self, shape: tuple[int, ...], why: str) -> tuple[Tensor, frozenset[int]]:
        """An unknown condition is False, unless the user says so or a loop waits for it."""
        index, self.decisions = self.decisions, self.decisions + 1
        place = (self.where(), why)
        decided = self.decision("branch")
        self.last_line = deciding_line(2)
        if decided is not None:
            usual = bool(decided)
        else:  # what is tested is false; so where the code takes `not` of it, the condition is true
            usual = asked_under_not(2) != (self.last_line in self.turned)
        endless = self._same_branch[place] >= MAX_SAME_BRANCH
        taken = self.branches.get(index, usual != endless)
        self.decided = index in self.branches or decided is not None
        self._same_branch[place] = self._same_branch[place] + 1 if taken == usual else 0
        text = _as_given(f"{why} of an unknown condition is taken as {taken}", decided)
        if endless:
            text += f" after {MAX_SAME_BRANCH} times"
        return torch.full(shape, taken), frozenset([self.assume("branch", text, taken)])

    def route(
        self, name: str, source: Tensor, index: Tensor, dimension: int, sorts: bool = False
    ) -> int | None:
        """Give the index output of topk, argmax, sort ... on unknown floats balanced values.

        Every class is chosen equally often (round robin), or by lot where the user wants that; a
        full sort keeps the order (sorts: the op is one).  Returns the id of the assumption.
        """
        if not 0 < index.numel() <= MAX_INTEGERS:
            return None
        classes = source.shape[dimension] if source.dim() else 1
        shape = tuple(index.shape)
        full = shape == tuple(source.shape) and sorts
        by_lot = not full and self.decision("balanced-routing") == "uniform"
        key = ("route", full, by_lot, shape, classes, index.dtype, dimension)
        value = self._memo.get(key)
        if value is None:
            if full:
                spread = [-1 if i == dimension % source.dim() else 1 for i in range(source.dim())]
                value = torch.arange(classes).reshape(spread).expand(shape).contiguous()
            elif by_lot:
                keeps = index.dim() == source.dim()  # argmax may drop the dimension
                value = drawn(shape, max(classes, 1), dimension if keeps else None)
            else:
                value = (torch.arange(index.numel()) % max(classes, 1)).reshape(shape)
            value = self._memo[key] = value.to(index.dtype)
            self._shared.add(bytes_of(value))
        how = "by lot, as given" if by_lot else "equally often"
        taint = self.assume(
            "uniform-routing" if by_lot else "balanced-routing",
            f"{name} over {classes} classes on unknown scores chooses each {how}",
            classes,
        )
        self.learn(index, value, frozenset([taint]))
        return taint

    def decide(self, name: str, tensors: Sequence[Tensor], output: Tensor) -> frozenset[int] | None:
        """Learn what `&` or `|` gives where one side alone decides it; None where none does."""
        deciding = DECIDING[name]
        for tensor in tensors:
            entry = self.known(tensor)
            if entry is None or tensor.dtype != torch.bool or not small(output):
                continue
            if bool((entry.value == deciding).all()):
                value = torch.full(tuple(output.shape), deciding, dtype=torch.bool)
                self.learn(output, value, entry.taint)
                return entry.taint
        return None

    # -- propagating -----------------------------------------------------------------------------

    def propagate(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        mutated: Sequence[Tensor],
    ) -> frozenset[int] | None:
        """Compute `func` on known values too, and learn its outputs.

        Returns the assumptions that they rest on; None if they are unknown.
        """
        if is_collective(func):  # the other processes have a say
            self._forget_all(mutated)
            return None
        if is_random(func) and not (self._generator is not None and _draws_integers(func, outputs)):
            self._forget_all(mutated)
            return None
        entries: dict[int, Known] = {}
        for tensor in tensors:
            entry = self.known(tensor)
            if entry is None or not small(tensor):
                self._forget_all(mutated)
                return None
            entries[id(tensor)] = entry
        if not all(small(output) for output in outputs):
            self._forget_all(mutated)
            return None
        for tensor in mutated:
            if bytes_of(entries[id(tensor)].value) in self._shared:
                entries[id(tensor)] = self._unshared(tensor, entries[id(tensor)])
        by_id = {key: entry.value for key, entry in entries.items()}
        result = self._compute(name, func, args, kwargs, by_id, bool(mutated))
        if result is None:
            self._forget_all(mutated)
            return None
        taint: frozenset[int] = frozenset().union(*(entry.taint for entry in entries.values()))
        for output, value in zip(outputs, listed(result), strict=False):
            self.learn(output, value, taint)
        return taint

    def _forget_all(self, mutated: Sequence[Tensor]) -> None:
        for tensor in mutated:
            self.forget(tensor)

    def _unshared(self, tensor: Tensor, entry: Known) -> Known:
        """A value of its own for a tensor that is about to be written; its views become unknown."""
        self.forget(tensor)
        self.learn(tensor, entry.value.clone(), entry.taint)
        return Known(tensor.__dict__[KNOWN].value, entry.taint, entry.epoch)

    def _compute(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        by_id: Mapping[int, Tensor],
        mutates: bool,
    ) -> Any:
        """The result of `func` on the CPU with known values for meta tensors; None if it fails.

        Equal calls are computed once: layers make the same masks over and over.
        """

        def swap(item: Any) -> Any:
            if isinstance(item, Tensor):
                return by_id[id(item)]
            if isinstance(item, (list, tuple)):
                return [swap(x) for x in item]
            return _CPU if isinstance(item, torch.device) else item

        new_args = [swap(item) for item in args]
        new_kwargs = {name: swap(item) for name, item in kwargs.items()}
        key = None
        # What inference mode makes has no version by which a change would be seen.
        untracked = torch.is_inference_mode_enabled() or any(
            value.is_inference() for value in by_id.values()
        )
        if not mutates and by_id and not untracked:
            key = (func, repr(_fingerprint((*new_args, *new_kwargs.items()))))
            hit = self._memo.get(key)
            if hit is not None and all(t._version == version for t, version in hit[1]):
                own = {bytes_of(value) for value in by_id.values()}  # a view is shared on purpose
                self._shared.update({bytes_of(t) for t, _ in hit[1]} - own)
                return hit[0]
        try:
            result = run_on_cpu(name, func, new_args, new_kwargs, self._generator)
        except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError):
            return None  # a value that cannot be computed is an unknown value
        if key is not None:
            # The inputs are kept so that their ids stay theirs.
            self._memo[key] = (result, [(t, t._version) for t in listed(result)], by_id)
        return result


_CPU = torch.device("cpu")
_MAX_DRAWN = 1 << 22
"""Random numbers that are drawn at a time."""
_DRAWS = 32


def _draws_integers(func: Any, outputs: Sequence[Tensor]) -> bool:
    """Whether a random op makes whole numbers from nothing."""
    takes = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return not takes and not any(t.dtype.is_floating_point for t in outputs)


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
    if generator is not None and is_random(func):
        drawer = func._overloadpacket
        return drawer(*args, **{**kwargs, "generator": generator, "device": _CPU})
    result = func(*args, **kwargs)
    if name in UNINITIALISED:
        result.zero_()
    return result


def _fingerprint(items: Sequence[Any]) -> list[Any]:
    """Arguments as something whose repr is equal only for equal calls."""
    return [
        ("tensor", id(item), item._version)
        if isinstance(item, Tensor)
        else _fingerprint(item)
        if isinstance(item, (list, tuple))
        else item
        for item in items
    ]


def _label(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} tensor"


def _as_given(text: str, decided: Any) -> str:
    return text if decided is None else f"{text}, as given"


def drawn(shape: tuple[int, ...], classes: int, dimension: int | None) -> Tensor:
    """Indices of this shape into `classes`, each as likely, distinct along `dimension` (if any).

    The number of different classes hit by chance varies: of some draws by fixed seeds this is the
    one that is nearest to the expected number.
    """
    k = 1 if dimension is None else shape[dimension]
    if k > classes:  # drawn with replacement
        k, dimension = 1, None
    rows = math.prod(shape) // max(k, 1)
    expected = classes * (1 - (1 - k / classes) ** rows)
    best, distance = torch.zeros(rows, k, dtype=torch.long), math.inf
    for seed in range(_DRAWS):
        chosen = _chosen(rows, k, classes, torch.Generator().manual_seed(seed))
        off = abs(int((torch.bincount(chosen.flatten()) > 0).sum()) - expected)
        if off < distance:
            best, distance = chosen, off
        if distance <= 0.5 or rows * classes > _MAX_DRAWN:
            break
    if dimension is None:
        return best.reshape(shape)
    along = dimension % len(shape)
    others = [n for i, n in enumerate(shape) if i != along]
    return best.reshape(*others, k).movedim(-1, along).contiguous()


def _chosen(rows: int, k: int, classes: int, generator: torch.Generator) -> Tensor:
    """k distinct classes in each row."""
    if k == 1:
        return torch.randint(classes, (rows, 1), generator=generator)
    step = max(1, _MAX_DRAWN // classes)
    return torch.cat(
        [
            torch.rand(min(step, rows - first), classes, generator=generator).topk(k).indices
            for first in range(0, rows, step)
        ]
        or [torch.zeros(0, k, dtype=torch.long)]
    )
