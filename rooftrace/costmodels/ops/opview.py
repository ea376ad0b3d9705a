"""An op as a rule sees it (sizes, precisions, arguments, bytes), and the registry of rules.

A rule adds up the costs of these methods: `op.read(tensor)`, `op.write(tensor)`, or `op.streamed()`
for an op that reads each operand once and writes each result once.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rooftrace import _extensions
from rooftrace._extensions import owner, refuse_second, track
from rooftrace.costmodels.ops.cost import (
    FAMILIES,
    FUSION_CLASSES,
    KINDS,
    TRAITS,
    Access,
    Cost,
    FusionClass,
    check,
    family_of,
    kind_of,
)
from rooftrace.errors import hint, worded
from rooftrace.hardware.precisions import compute_family, widest


class TensorView(Struct, frozen=True):
    """A tensor as a rule sees it: sizes only, and a local storage index, shared with its views."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    storage: int
    elements: int
    unique_elements: int
    nbytes: int
    floating: bool

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


class Slot(Struct, frozen=True):
    """Stands in an OpView's arguments for the tensor at this position of `inputs`."""

    index: int


class OpView(Struct, frozen=True):
    """An op as a rule sees it: shapes, precisions and attributes, but not which tensors they are.

    Two ops with equal views cost the same, so each view is priced once.  `arguments` is a tuple of
    (schema name, value), without those left at their defaults; a tensor is a Slot(position in
    inputs).  schema: the names of all arguments of the op; methods raise ValueError for other
    names.  None: unknown, and not checked.
    """

    target: str
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    arguments: tuple[tuple[str, Any], ...]
    facts: tuple[tuple[str, Any], ...] = ()
    schema: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """The op with its arguments: "mylib.rope.default(x=bf16[8, 64], base=500)"."""
        shown = (f"{name}={self._shown(value)}" for name, value in self.arguments)
        return f"{self.target}({', '.join(shown)})"

    def attribute(self, name: str, default: Any = None) -> Any:
        """A non-tensor argument by schema name; `default` where the call does not pass it."""
        self._check(name)
        return self._argument(name, default)

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact of the tracer about this op (rows_touched, groups_touched, mask ...)."""
        for key, value in self.facts:
            if key == name:
                return value
        return default

    def tensor(self, name: str) -> TensorView | None:
        """A tensor argument by schema name; None where the call passes none."""
        self._check(name)
        return self._tensor(name)

    def tensors(self, name: str) -> tuple[TensorView, ...]:
        """A tensor-list argument by schema name (absent members left out), or the one tensor."""
        self._check(name)
        return self._tensors(name)

    def _check(self, *names: str) -> None:
        if self.schema is None:
            return
        for name in names:
            if name not in self.schema:
                raise ValueError(
                    f'{self.target} has no argument "{name}"; its schema has '
                    f"{', '.join(self.schema) or 'none'}{hint(name, self.schema)}"
                )

    def _argument(self, name: str, default: Any = None) -> Any:
        for key, value in self.arguments:
            if key == name:
                return value
        return default

    def _tensor(self, name: str) -> TensorView | None:
        value = self._argument(name)
        return self.inputs[value.index] if isinstance(value, Slot) else None

    def _tensors(self, name: str) -> tuple[TensorView, ...]:
        value = self._argument(name, ())
        if value is None or isinstance(value, Slot):
            value = (value,)
        return tuple(self.inputs[item.index] for item in value if isinstance(item, Slot))

    @property
    def precision(self) -> str:
        """The widest precision of its floating inputs (of inputs and outputs if it has none)."""
        names = [t.dtype for t in self.inputs if t.floating]
        if not names:
            names = [t.dtype for t in (*self.inputs, *self.outputs)]
        return widest(*names) if names else "fp32"

    def first(self, *names: str) -> TensorView | None:
        """The first of these tensor arguments that the call passes: schemas differ in their names.

        Only one of the names must be in the schema.
        """
        if self.schema is not None and not set(names) & set(self.schema):
            self._check(*names)
        return next((t for name in names if (t := self._tensor(name)) is not None), None)

    def needed(self, *names: str) -> TensorView:
        """The first of these tensor arguments.  Raises ValueError where the op has none of them."""
        tensor = self.first(*names)
        if tensor is None:
            raise ValueError(
                f"{self.target}: expected a tensor argument {' or '.join(names)}, "
                f"got {', '.join(name for name, _ in self.arguments) or 'no arguments'}"
            )
        return tensor

    def operands(
        self, only: Collection[str] | None = None, but: Collection[str] = ()
    ) -> Iterator[tuple[str, TensorView]]:
        """Tensor arguments with their schema names; members of a list have the name of the list.

        A tensor that is passed twice, as in x * x, comes once.  Two slices of one storage come
        both, even if their sizes are equal.
        """
        self._check(*but, *(only or ()))
        seen = set()
        for name, value in self.arguments:
            if name in but or (only is not None and name not in only):
                continue
            for slot in _slots(value):
                if slot.index not in seen:
                    seen.add(slot.index)
                    yield name, self.inputs[slot.index]

    def written(self) -> tuple[TensorView, ...]:
        """The written tensors: its outputs; of an in-place op without any, its `self`."""
        if self.outputs or not self.target.rsplit(".", 1)[0].endswith("_"):
            return self.outputs
        return self._tensors("self")

    def read(self, tensor: TensorView | None, size: int | None = None) -> Cost:
        """Reading `size` bytes of a tensor (default: each distinct element once)."""
        return _moved(tensor, size, write=False)

    def write(self, tensor: TensorView | None, size: int | None = None) -> Cost:
        """Writing `size` bytes of a tensor (default: each distinct element once)."""
        return _moved(tensor, size, write=True)

    def read_all(self, tensors: Iterable[TensorView | None]) -> Cost:
        """Each of these tensors read once; None costs nothing."""
        return _all_moved(tensors, write=False)

    def write_all(self, tensors: Iterable[TensorView | None]) -> Cost:
        """Each of these tensors written once; None costs nothing."""
        return _all_moved(tensors, write=True)

    def streamed(self, unread: Collection[str] = ()) -> Cost:
        """Every operand read once, every written tensor written once.

        Not read are the arguments named in `unread`, and the buffers of an out= overload.
        """
        overload = self.target.rsplit(".", 1)[-1]
        into_buffers = overload == "out" or overload.endswith("_out")
        buffers = {t.storage for t in self.outputs} if into_buffers else set[int]()
        inputs = (
            tensor
            for name, tensor in self.operands(but=unread)
            if tensor.storage not in buffers or name in ("self", "input")
        )
        return self.read_all(inputs) + self.write_all(self.written())

    def reading(self, *names: str) -> Cost:
        """These arguments read once, every written tensor written once."""
        inputs = (tensor for _, tensor in self.operands(only=names))
        return self.read_all(inputs) + self.write_all(self.written())

    def _shown(self, value: Any) -> str:
        if isinstance(value, Slot):
            tensor = self.inputs[value.index]
            return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        if isinstance(value, tuple):
            return f"[{', '.join(map(self._shown, value))}]"
        return f"{value!r}"


def _moved(tensor: TensorView | None, size: int | None, write: bool) -> Cost:
    if tensor is None:
        return Cost()
    amount = tensor.nbytes if size is None else size
    return Cost({}, {Access(tensor.storage, write): amount}) if amount else Cost()


def _all_moved(tensors: Iterable[TensorView | None], write: bool) -> Cost:
    traffic: dict[Access, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.nbytes:
            key = Access(tensor.storage, write)
            traffic[key] = traffic.get(key, 0) + tensor.nbytes
    return Cost({}, traffic)


def _slots(argument: Any) -> Iterator[Slot]:
    if isinstance(argument, Slot):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _slots(item)


# -- The registry of pricing rules, and the lookup of the rule that prices an op -------------------

RuleFunction = Callable[[OpView], Cost]


OURS = "rooftrace"
"""The source of this package's rules."""


class RuleError(ValueError):
    """A user's rule that raises an error, or that returns no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The price of one op, and its kind, family and traits."""

    name: str  # of the op, with or without overload
    price: RuleFunction
    fusion: FusionClass  # how a compiler may fuse it
    source: str = OURS
    kind: str | None = None  # None: its cost tells
    family: str | None = None  # None: its cost tells
    label: str | None = None  # of its kernel in reports; None: the op's name
    fused: str | None = None  # label of a kernel of several ops; None: the other ops decide it
    traits: frozenset[str] = frozenset()  # see `kinds`

    @property
    def is_own(self) -> bool:
        """Whether a user or a third-party package registered it."""
        return self.source != OURS

    def cost_of(self, op: OpView, schema: tuple[str, ...] | None = None) -> Cost:
        """The cost of an op.  schema: the names of all its arguments, None where unknown.

        An exception in a user's rule becomes a RuleError, which names the rule, its file and the
        op.  Only such a rule is held to the schema: a rule of this package is for many ops, and
        looks for names that some of them do not have.
        """
        if not self.is_own:
            return self.price(op)
        about = f'rule "{self.name}" ({owner(self.price)}) for {op}: '
        try:
            cost: object = self.price(replace(op, schema=schema))
            for work in cost.work if isinstance(cost, Cost) else ():
                compute_family(work.precision)
        except Exception as error:  # of a user's code
            raise RuleError(f"{about}{worded(error)}") from error
        if not isinstance(cost, Cost):
            raise RuleError(f"{about}it returned {cost!r:.60}; expected a rooftrace.extend.Cost")
        return cost

    def kind_of(self, cost: Cost) -> str:
        """Its kind, for an op of this cost."""
        return self.kind or kind_of(cost, self.fusion)

    def family_of(self, cost: Cost) -> str:
        """Its family, for an op of this cost."""
        return self.family or family_of(cost, self.kind_of(cost))


RULES: dict[str, Rule] = track({})
"""By op."""


_loaded = False


def load_ours() -> None:
    """Import the rules of this package, once; they register themselves."""
    global _loaded
    if not _loaded:
        _loaded = True
        importlib.import_module("rooftrace.costmodels.rules")


def rule(
    *names: str,
    fusion: FusionClass = "opaque",
    kind: str | None = None,
    family: str | None = None,
    label: str | None = None,
    fused: str | None = None,
    traits: Collection[str] = (),
    source: str = "user",
    override: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register the decorated function `price(op: OpView) -> Cost` for these ops.

    kind, family: of the op; by default its cost tells.  label: of its kernel in reports.  fused:
    the label of a kernel of several ops that it leads, by default the same.  A second rule for one
    op raises RequestError naming both owners, unless override=True or it is the
    same function defined again (a file or a notebook cell that ran twice); a name without a
    namespace, and an unknown fusion class, kind, family or trait raise ValueError.
    """
    if not names:
        raise ValueError('rule(): expected the name of an op, for example "mylib::fast_gemm"')
    of = f"rule({', '.join(map(repr, names[:1]))}): "
    check(f"{of}fusion", fusion, FUSION_CLASSES)
    check(f"{of}kind", kind, KINDS)
    check(f"{of}family", family, FAMILIES)
    for trait in traits:
        check(f"{of}trait", trait, TRAITS)

    def add(function: RuleFunction) -> RuleFunction:
        if source != OURS:
            load_ours()  # which a user's rule may be for
        for name in names:
            key = name.replace("::", ".")
            if "." not in key:
                raise ValueError(f'rule({name!r}): expected "namespace::{name}"')
            old = RULES.get(key)
            there, taken = f"{name!r} already has a rule", getattr(old, "price", None)
            refuse_second(there, taken, function, override=override)
            RULES[key] = Rule(
                name=key,
                price=function,
                fusion=fusion,
                source=source,
                kind=kind,
                family=family,
                label=label,
                fused=fused or label,
                traits=frozenset(traits),
            )
        return function

    return add


builtin = partial(rule, source=OURS)
"""`rule` for this package's rules: `@builtin("aten.mm")`."""


# -- lookup ----------------------------------------------------------------------------------------
# The rule of an op, of this package, of third-party packages or of users.


def find_rule(target: str) -> Rule | None:
    """The rule for a full target ("aten.mm.default"), or None."""
    _load()
    return RULES.get(target) or RULES.get(target.rsplit(".", 1)[0])


def all_rules() -> Iterator[Rule]:
    """Every registered rule, by name."""
    _load()
    return iter(sorted(RULES.values(), key=lambda r: r.name))


def users_rules() -> tuple[Rule, ...]:
    """The rules of neither this package nor a third-party package, by name."""
    modules = (module for _, module in _extensions.load("rooftrace.rules"))
    brought = {module.__name__.partition(".")[0] for module in modules}
    others = sorted((rule for rule in RULES.values() if rule.is_own), key=lambda r: r.name)
    return tuple(r for r in others if (r.price.__module__ or "").partition(".")[0] not in brought)


@contextlib.contextmanager
def own_rules() -> Iterator[None]:
    """Undo the registrations of a `with` block at its end: rules, joins, sections and the like."""
    _load()
    with _extensions.only_here():
        yield


def _load() -> None:
    """Import the rules of this package and of third-party packages, once."""
    load_ours()
    _extensions.load("rooftrace.rules")
