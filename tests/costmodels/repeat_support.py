"""Random graphs with repeats, as they are stored, and what a short graph has to agree on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from rooftrace.costmodels.fusion.plans import Plan
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Neighbour, Ref, Repeat
from tests.costmodels.graph_support import Builder

ROWS, WIDTH = 6, 8
KINDS = (
    "exp", "mul", "mm", "softmax", "sum", "relu_", "view", "carried", "sort", "stack", "foreach",
    "unbind", "item", "open",
)  # fmt: skip
ROLES = ("activations", "temporary", "gradients", "kv")


class Nest:
    """Grows a graph op by op; knows which repeats it is in."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.b = draw, Builder()
        self.repeats: list[Repeat] = []
        self.inside: tuple[int, ...] = ()
        self.part = "forward"
        self.edges: list[int] = []
        self.weight = self.b.weight(WIDTH, WIDTH)
        self.full = [self.b.input(ROWS, WIDTH), self.b.input(ROWS, WIDTH)]

    # -- pieces ------------------------------------------------------------------------------------

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def value(self, shape: Sequence[int], like: int | None = None, **options: Any) -> int:
        role = self.draw(st.sampled_from(ROLES)) if like is None else "activations"
        made = self.b.value(shape if like is None else self.b.places[like], role, like, **options)
        return self.placed(made)

    def placed(self, value: int, repeats: tuple[int, ...] | None = None) -> int:
        """The value has a copy in every iteration of where we are."""
        tensor = self.b.values[value]
        self.b.values[value] = replace(tensor, repeats=self.inside if repeats is None else repeats)
        return value

    def pick(self) -> Ref:
        return Ref(self.full[self.number(0, len(self.full) - 1)])

    def op(self, target: str, arguments: dict[str, Any], *outputs: int, **fields: Any) -> None:
        fields = {"part": self.part, "function": target, "repeats": self.inside, **fields}
        self.b.op(target, arguments, outputs, **fields)

    def add(self, kind: str) -> None:
        getattr(self, f"_{kind}")()

    # -- ops ---------------------------------------------------------------------------------------

    def _exp(self) -> None:
        self._one("aten.exp")

    def _softmax(self) -> None:
        self._one("aten._softmax", dim=-1, half_to_float=False)

    def _one(self, target: str, **arguments: Any) -> None:
        x = self.pick()
        out = self.value((ROWS, WIDTH))
        self.op(target, {"self": x, **arguments}, out)
        self.full.append(out)

    def _mul(self) -> None:
        x, y = self.pick(), self.pick()
        out = self.value((ROWS, WIDTH))
        self.op("aten.mul.Tensor", {"self": x, "other": y}, out)
        self.full.append(out)

    def _mm(self) -> None:
        own = self.placed(self.b.weight(WIDTH, WIDTH)) if self.number(0, 1) else self.weight
        x, out = self.pick(), self.value((ROWS, WIDTH))
        self.op("aten.mm", {"self": x, "mat2": Ref(own)}, out)
        self.full.append(out)

    def _sum(self) -> None:
        self.op("aten.sum.dim_IntList", {"self": self.pick(), "dim": (1,)}, self.value((ROWS,)))

    def _relu_(self) -> None:
        x = self._here()
        if x is not None:
            out = self.value((), x)
            self.op("aten.relu_", {"self": Ref(x)}, out)
            self.full.append(out)

    def _view(self) -> None:
        x = self._here()
        if x is not None:
            out = self.value((), x)
            self.op("aten.alias", {"self": Ref(x)}, out, kind="view")
            self.full.append(out)

    def _here(self) -> int | None:
        """A value that every iteration has its own of."""
        found = [v for v in self.full if self.b.values[v].repeats == self.inside]
        return found[self.number(0, len(found) - 1)] if found else None

    def _sort(self) -> None:
        x = self.pick()
        outs = self.value((ROWS, WIDTH)), self.value((ROWS, WIDTH), dtype="int64")
        self.op("aten.sort", {"self": x}, *outs)
        self.full.append(outs[0])

    def _item(self) -> None:
        self.op("aten._local_scalar_dense", {"self": self.pick()}, kind="sync")

    def _carried(self) -> None:
        """Reads what the iteration before made; the first one reads an equal value from before."""
        if not self.inside:
            return
        back = self.part == "backward"
        edge = self.edges[-1]
        out = self.placed(self.b.value((ROWS, WIDTH), self.b.values[edge].role))
        then = Neighbour(self.inside[-1], out, 1 if back else -1)
        self.op("aten.mul.Tensor", {"self": Ref(edge, then), "other": self.pick()}, out)
        self.full.append(out)

    def _lists(self) -> list[Ref]:
        """Several values; of those in repeats all copies."""
        found = [self.pick().id for _ in range(self.number(1, 3))]
        outer = [set(self.b.values[v].repeats) - set(self.inside) for v in found]
        return [Ref(v, every=bool(left)) for v, left in zip(found, outer, strict=True)]

    def _stack(self) -> None:
        items = self._lists()
        # All of them would be longer, but sizes do not matter; nor is it a cache that grows.
        out = self.placed(self.b.value((ROWS, WIDTH)))
        self.op("aten.cat", {"tensors": tuple(items), "dim": 0}, out)
        self.full.append(out)

    def _foreach(self) -> None:
        depth = len(self.inside)
        items = [r for r in self._lists() if self.b.values[r.id].repeats[:depth] == self.inside]
        outs = [
            self.placed(self.b.value((ROWS, WIDTH)), self.b.values[r.id].repeats) for r in items
        ]
        if items:
            arguments = {"self": tuple(items), "scalar": 1.0}
            self.op("aten._foreach_add.NonTensor", arguments, *outs)
            self.full += outs

    def _unbind(self) -> None:
        """A value for every iteration of some repeat."""
        if self.repeats and not self.inside:
            repeat = self.number(0, len(self.repeats) - 1)
            x = self.pick()
            out = self.placed(self.b.value(self.b.places[x.id][:1], like=x.id), (repeat,))
            self.op("aten.unbind.int", {"self": x}, out, kind="view")

    def _open(self) -> None:
        """A new repeat, or one that has been there, gone through in reverse."""
        if len(self.inside) >= 2:
            return
        again = [
            r.id
            for r in self.repeats
            if r.id not in self.inside and not self.inside and self.part == "forward"
        ]
        if again and self.number(0, 1):
            with self.within(again[self.number(0, len(again) - 1)], "backward"):
                self._body()
            return
        repeat = Repeat(len(self.repeats), self.draw(st.sampled_from((2, 3, 5, 7, 8, 9, 20))))
        self.repeats.append(repeat)
        with self.within(repeat.id, self.part):
            self._body()

    def _body(self) -> None:
        for kind in self.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)):
            self.add(kind)

    @contextmanager
    def within(self, repeat: int, part: str) -> Iterator[None]:
        """In the iterations of a repeat."""
        outside = self.inside, self.part
        self.edges.append(self.value((ROWS, WIDTH)))
        self.op("aten.exp", {"self": self.pick()}, self.edges[-1])
        self.inside, self.part = (*self.inside, repeat), part
        yield
        self.inside, self.part = outside
        self.edges.pop()


@st.composite
def nests(draw: st.DrawFn) -> OpGraph:
    """A graph with repeats, one inside another, gone through forward and backward."""
    nest = Nest(draw)
    nest.add("exp")
    nest.add("open")
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=8)):
        nest.add(kind)
    outputs = draw(st.lists(st.sampled_from(nest.full), min_size=1, max_size=2, unique=True))
    return nest.b.graph(*outputs, repeats=tuple(nest.repeats))


# -- equal modules, written out --------------------------------------------------------------------


@st.composite
def stacks(draw: st.DrawFn) -> OpGraph:
    """Six to nine equal modules of a few ops, forward and perhaps backward, all written out."""
    kinds = ("exp", "mul", "mm", "softmax", "sum", "relu_", "shared", "norm")
    body = draw(
        st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 9)), min_size=2, max_size=8)
    )
    count, backward = draw(st.integers(6, 9)), draw(st.booleans())
    b = Builder()
    x, shared = b.input(ROWS, WIDTH), b.input(ROWS, WIDTH)
    saved = []

    def layer(number: int, carried: int, kept: int, **fields: Any) -> int:
        own = b.value((WIDTH, WIDTH), "weights", name=f"layers.{number}.weight")
        vector = b.value((WIDTH,), "weights", name=f"layers.{number}.bias")
        local, first = [carried, kept], len(b.ops)
        for kind, operand in body:
            one = local[operand % len(local)]
            if kind == "mm":
                local.append(b.mm(one, own))
            elif kind == "norm":
                local.append(b.layer_norm(one, vector, vector))
            elif kind == "mul":
                local.append(b.binary("mul", one, local[-1]))
            elif kind == "shared":
                local.append(b.binary("add", shared, shared))
            elif kind == "sum":
                local.append(b.binary("mul", one, b.sum(one)))
            elif kind == "relu_":
                local.append(b.in_place(kind, local[-1]) if len(local) > 2 else b.unary("exp", one))
            else:
                local.append(b.softmax(one) if kind == "softmax" else b.unary(kind, one))
        for index in range(first, len(b.ops)):
            b.ops[index] = replace(b.ops[index], module=f"layers.{number}", **fields)
        return local[-1]

    for number in range(count):
        x = layer(number, x, shared)
        saved.append(x)
    if backward:
        for number in reversed(range(count)):
            x = layer(number, x, saved[number], part="backward", function="Backward0")
    return b.graph(x)


# -- what has to agree -----------------------------------------------------------------------------


def kernels(plan: Plan) -> Counter[Any]:
    """How many kernels of each kind: what they are called, compute and move of whose bytes."""
    found: Counter[Any] = Counter()
    for group, cost in zip(plan.groups, plan.costs, strict=True):
        moved: Counter[Any] = Counter()
        for access, size in cost.traffic.items():
            moved[plan.graph.values[access.storage].role, access.write, access.wire] += size
        work = frozenset(cost.work.items())
        found[group.pattern, group.name, work, frozenset(moved.items())] += group.times
    return found


def totals(plan: Plan) -> dict[str, Any]:
    """What does not depend on a chip."""
    return {
        "work": dict(plan.total.work),
        "bytes": plan.bytes,
        "compulsory": plan.compulsory,
        "coverage": plan.coverage,
        "notes": plan.notes,
    }
