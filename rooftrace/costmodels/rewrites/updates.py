"""Steps of Adam, and of SGD with momentum, known by what they do to a few numbers.

Each tensor of an optimizer stands for some random numbers, on which its ops run as they are
written.  A step is Adam's if its results follow from its inputs by Adam's formula, with factors
that are found by least squares; names of ops and their order decide nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, NamedTuple

from rooftrace._amounts import np
from rooftrace.graph import Op, OpGraph, Ref


@dataclass(eq=False)
class TensorState:
    """Numbers of a tensor at one moment of the optimizer: some random elements of it.

    ref: as it was first read.  op: by which it was made, None before; how: the name and the numbers
    of that op.  known: whether the numbers are worked out from those of `parents`, element by
    element.
    """

    storage: int
    numbers: Any
    ref: Ref | None = None
    op: int | None = None
    how: tuple[Any, ...] = ()
    known: bool = True
    parents: tuple[TensorState, ...] = ()

    def ancestors(self, until: Collection[TensorState] = ()) -> dict[TensorState, None]:
        """The states that this one is made of, and itself, but for some and what these are of."""
        reached, stack = dict[TensorState, None](), [self]
        while stack:
            state = stack.pop()
            if state not in reached and state not in until:
                reached[state] = None
                stack += state.parents
        return reached


_OTHER = ("other", "scalars", "scalar", "exponent", "tensors1", "end", "src")
_SCALE = ("value", "scalars")
_FORMULAS: Mapping[str, Callable[[Callable[..., Any]], Any]] = {
    "add": lambda of: of("self") + of(*_OTHER) * of("alpha"),
    "sub": lambda of: of("self") - of(*_OTHER) * of("alpha"),
    "mul": lambda of: of("self") * of(*_OTHER),
    "div": lambda of: of("self") / of(*_OTHER),
    "lerp": lambda of: of("self") + of("weight") * (of(*_OTHER) - of("self")),
    "addcmul": lambda of: of("self") + of(*_SCALE) * of("tensor1") * of("tensor2"),
    "addcdiv": lambda of: of("self") + of(*_SCALE) * of("tensor1") / of("tensor2"),
    "pow": lambda of: of("self") ** of(*_OTHER),
    "sqrt": lambda of: of("self") ** 0.5,
    "rsqrt": lambda of: of("self") ** -0.5,
    "reciprocal": lambda of: 1 / of("self"),
    "neg": lambda of: -of("self"),
    **dict.fromkeys(("clone", "_to_copy"), lambda of: of("self")),
    "copy": lambda of: of(*_OTHER),
}
"""Ops on a tensor, or on lists of tensors, on numbers; `of` gives the first argument there is."""
_SAMPLES = 16
"""Numbers that stand for a tensor: more than a step of an optimizer has unknown factors."""
_STATES = 5
"""Tensors that a step writes beside its weights from which on it is not looked at: moments, the
largest of them, a gradient that is clipped."""


class Updates:
    """First and last states of the tensors that an optimizer writes into, and its steps on them."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.random = graph, np.random.default_rng(0)
        self.first, self.last = dict[int, TensorState](), dict[int, TensorState]()
        for op in graph.ops:
            if op.part == "optimizer" and op.kind == "kernel":
                self._run(op)

    def _run(self, op: Op) -> None:
        name = op.name.removeprefix("aten.").removeprefix("_foreach_").rstrip("_")
        made = [self._made(op, name, place) for place in range(len(op.outputs))]
        self.last |= zip((self.graph.values[v].storage for v in op.outputs), made, strict=True)

    def _made(self, op: Op, name: str, place: int) -> TensorState:
        """The state of a result; new numbers where it is not worked out element by element."""
        values, parents, how = self.graph.values, list[TensorState](), list[Any]([name])
        made = values[op.outputs[place]]

        def of(*names: str) -> Any:
            items = (op.arguments.get(name) for name in names)
            item = next((item for item in items if item is not None), 1)
            item = item[place] if isinstance(item, tuple) else item
            if not isinstance(item, Ref):
                how.append(item)
                return item
            if values[item.id].elements not in (1, made.elements):
                raise TypeError
            parents.append(self._read(item))
            return parents[-1].numbers

        try:
            with np.errstate(all="ignore"):
                numbers = _FORMULAS[name](of) + 0.0
            return TensorState(
                made.storage, numbers, op=op.id, how=tuple(how), parents=tuple(parents)
            )
        except (KeyError, TypeError, IndexError):
            return TensorState(made.storage, self._new(made.elements), op=op.id, known=False)

    def _read(self, ref: Ref) -> TensorState:
        tensor = self.graph.values[ref.id]
        whole = tensor.elements == self.graph.values[tensor.storage].elements
        if tensor.storage not in self.last or not whole:
            state = TensorState(tensor.storage, self._new(tensor.elements), ref, known=whole)
            self.first[tensor.storage] = self.last[tensor.storage] = state
        state = self.last[tensor.storage]
        state.ref = state.ref or ref
        return state

    def _new(self, elements: int) -> Any:
        return self.random.uniform(0.5, 1.5, _SAMPLES if elements > 1 else 1)

    def rows(self) -> Iterator[UpdateRow]:
        """Steps of Adam, or of SGD with momentum, on one tensor each."""
        known = dict[Hashable, list[_Step]]()
        for storage in self.first:
            states = [*self.last[storage].ancestors()]
            key = self._written(states)
            if key not in known:
                known[key] = [*self._steps(states)]
            rows = (self._row(states, step) for step in known[key])
            if row := next(filter(None, rows), None):
                yield row

    def _is_end(self, state: TensorState) -> bool:
        """Whether a state is the last of a tensor that was read before."""
        first = self.first.get(state.storage, state)
        return first is not state and self.last[state.storage] is state

    def _is_like(self, state: TensorState, other: TensorState) -> bool:
        """Whether the tensors of two states have one shape."""
        values = self.graph.values
        return values[state.storage].shape == values[other.storage].shape

    def _written(self, states: Sequence[TensorState]) -> Hashable:
        """How the first state is made of the others: what steps share that are written alike."""
        places = {state: place for place, state in enumerate(states)}
        tensors = {state.storage: place for state, place in places.items()}
        return tuple(
            (
                state.how,
                state.known,
                len(state.numbers),
                self._is_end(state),
                self._is_like(state, states[0]),
                tensors[state.storage],
                tuple(places[parent] for parent in state.parents),
            )
            for state in states
        )

    def _steps(self, states: Sequence[TensorState]) -> Iterator[_Step]:
        """Ways to read the making of the first state, a weight, as a step on it."""
        end, *others = states
        moments = [s for s in others if self._is_end(s) and self._is_like(s, end)]
        if not self._is_end(end) or len(moments) >= _STATES:
            return
        places = {state: place for place, state in enumerate(states)}
        for order in (order for count in (2, 1) for order in permutations(moments, count)):
            ends, kind = (end, *order), {1: _as_sgd, 2: _as_adam}[len(order)]
            firsts = [self.first[state.storage] for state in ends]
            for grad in reversed([*order[0].ancestors()]):
                options = kind(firsts, ends, grad) if grad not in {*firsts, *ends} else None
                if options is None:
                    continue
                if (before := _before_decay(grad, firsts[0])) is not None:
                    grad, options = before, {**options, "weight_decay": 1}
                yield _Step(tuple(places[state] for state in ends), places[grad], options)

    def _row(self, states: Sequence[TensorState], step: _Step) -> UpdateRow | None:
        """The step of one tensor; None where a fused kernel could not take its place."""
        ends, grad = [states[place] for place in step.ends], states[step.grad]
        firsts = [self.first[state.storage] for state in ends]
        made = {state: None for end in ends for state in end.ancestors({grad})}
        refs = tuple(state.ref for state in (firsts[0], grad, *firsts[1:]) if state.ref)
        others = self._made_of[grad] - {state.storage for state in ends}
        others = {storage for storage in others if self.last[storage] is not grad}
        alone = all(state.known for state in made) and not others
        dtypes = {self.graph.values[ref.id].dtype for ref in refs}  # fused kernels take one
        if not alone or len(refs) != 1 + len(ends) or len(dtypes) > 1:
            return None
        ops = frozenset(state.op for state in made if state.op is not None)
        return UpdateRow(refs, ops, step.options)

    @cached_property
    def _made_of(self) -> dict[TensorState, set[int]]:
        """By state, the tensors whose last state is made of it."""
        made = defaultdict[TensorState, set[int]](set)
        for storage, end in self.last.items():
            for state in end.ancestors() if storage in self.first else ():
                made[state].add(storage)
        return made


class _Step(NamedTuple):
    """Places among the states: the last ones of the weight and its moments, and the gradient."""

    ends: tuple[int, ...]
    grad: int
    options: Mapping[str, float]


class UpdateRow(NamedTuple):
    """Weight, gradient and moments of one tensor, the ops of its step, and arguments for its rule.

    Of a decay these say only whether there is one.
    """

    refs: tuple[Ref, ...]
    ops: frozenset[int]
    options: Mapping[str, float]


def _before_decay(grad: TensorState, weight: TensorState) -> TensorState | None:
    """The gradient that a share of the weights was added to; None where none was."""
    made = grad.ancestors()
    for state in made if weight in made else ():
        if weight not in state.ancestors():
            factors = _factors(grad.numbers, state.numbers, weight.numbers)
            if factors is not None and abs(factors[0] - 1) < _ALIKE:
                return state
    return None


_Options = Mapping[str, float] | None


def _as_adam(
    first: Sequence[TensorState], last: Sequence[TensorState], grad: TensorState
) -> _Options:
    """The options of a step of Adam; None where it is no such step.

    m1 = b1 m0 + (1 - b1) g,  v1 = b2 v0 + (1 - b2) g^2,  w1 = d w0 - m1 / (p sqrt(v1) + q), where
    the last is linear in products of w0, w0 - w1 and sqrt(v1).
    """
    w0, m0, v0 = (state.numbers for state in first)
    w1, m1, v1 = (state.numbers for state in last)
    moments = _factors(m1, m0, grad.numbers), _factors(v1, v0, grad.numbers**2)
    if not all(each is not None and abs(sum(each) - 1) < _ALIKE for each in moments):
        return None
    root, moved = v1**0.5, w0 - w1
    factors = _factors(m1, moved * root, moved, w0 * root, w0)
    if factors is None or abs(factors[0]) < abs(factors[1]):
        return None
    return {"weight_decay": int(abs(factors[2]) > _ALIKE * abs(factors[0]))}


def _as_sgd(
    first: Sequence[TensorState], last: Sequence[TensorState], grad: TensorState
) -> _Options:
    """The options of a step of SGD with momentum, Nesterov's too; None where it is no such step.

    b1 = m b0 + c g,  w1 = w0 - r b1,  or  w1 = w0 - r (g + m b1).
    """
    (w0, b0), (w1, b1) = ([state.numbers for state in side] for side in (first, last))
    momentum = _factors(b1, b0, grad.numbers)
    step = _factors(w0 - w1, b1, grad.numbers)
    if momentum is None or step is None or abs(momentum[1]) < _ALIKE:
        return None
    ahead = abs(step[0] - momentum[0] * step[1]) < _ALIKE * abs(step[0])
    if not ahead and abs(step[1]) > _ALIKE * abs(step[0]):
        return None
    return {"momentum": float(momentum[0]), "nesterov": int(ahead), "weight_decay": 0}


_ALIKE = 1e-6
"""The part by which numbers that are equal by a formula may differ."""


def _factors(result: Any, *columns: Any) -> Sequence[float] | None:
    """The factors by which a result is a sum of columns; None where it is none."""
    matrix = np.stack([np.broadcast_to(column, _SAMPLES) for column in columns], axis=1)
    lengths = np.linalg.norm(matrix, axis=0)
    if not np.isfinite(matrix).all() or not lengths.all():
        return None
    factors = np.linalg.lstsq(matrix / lengths, np.broadcast_to(result, _SAMPLES), rcond=None)[0]
    left = np.abs(matrix / lengths @ factors - result).max()
    alike: bool = left <= _ALIKE * np.abs(result).max()
    return [*(factors / lengths)] if alike else None
