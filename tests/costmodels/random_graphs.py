"""Random small programs: products, rows, views, in-place ops, waits, several outputs."""

from __future__ import annotations

from hypothesis import strategies as st

from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Ref
from tests.costmodels.graph_support import Builder

ROWS, WIDTH = 6, 8
CHOICES = (
    "mm", "relu", "exp", "add", "mul", "scale", "softmax", "layer_norm", "sum", "add_sum", "sort",
    "relu_", "add_", "half", "copy_into_half", "turned", "item", "foreach", "unknown",
    "cat",
)  # fmt: skip


class Program:
    """Grows by one op of a drawn kind, on drawn operands of a [ROWS, WIDTH] shape."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.builder = Builder()
        self.full = [self.builder.input(ROWS, WIDTH), self.builder.input(ROWS, WIDTH)]
        self.sums = [self.builder.input(ROWS, 1)]
        self.weights = [self.builder.weight(WIDTH, WIDTH)]
        self.vectors = [self.builder.weight(WIDTH), self.builder.weight(WIDTH)]

    def pick(self) -> int:
        return self.full[self.draw(st.integers(0, len(self.full) - 1))]

    def add(self, kind: str) -> None:
        made = getattr(self, f"_{kind}", None)
        if made is not None:
            made()
        elif kind in ("relu", "exp"):
            self.full.append(self.builder.unary(kind, self.pick()))
        elif kind in ("add", "mul"):
            self.full.append(self.builder.binary(kind, self.pick(), self.pick()))
        elif kind == "relu_":
            self.full.append(self.builder.in_place(kind, self.pick()))
        else:
            self.full.append(getattr(self.builder, kind)(self.pick()))

    def _mm(self) -> None:
        self.full.append(self.builder.mm(self.pick(), self.weights[0]))

    def _scale(self) -> None:
        self.full.append(self.builder.binary("mul", self.pick(), 2.0))

    def _layer_norm(self) -> None:
        self.full.append(self.builder.layer_norm(self.pick(), *self.vectors))

    def _sum(self) -> None:
        self.sums.append(self.builder.sum(self.pick()))

    def _add_sum(self) -> None:
        self.full.append(self.builder.binary("add", self.pick(), self.sums[-1]))

    def _add_(self) -> None:
        x, other = self.pick(), self.pick()
        out = self.builder.value(self.builder.places[x], like=x)
        self.builder.op("aten.add_.Tensor", {"self": Ref(x), "other": Ref(other)}, [out])
        self.full.append(out)

    def _half(self) -> None:
        """The upper or lower rows, made whole again by a repeated view of them."""
        half = self._rows(self.pick())
        self.builder.unary("exp", half)

    def _rows(self, x: int) -> int:
        start = ROWS // 2 * self.draw(st.integers(0, 1))
        return self.builder.view(x, self.builder.places[x][start : start + ROWS // 2])

    def _copy_into_half(self) -> None:
        target, source = self._rows(self.pick()), self._rows(self.pick())
        self.builder.copy_into(target, source)

    def _turned(self) -> None:
        x = self.pick()
        turned = self.builder.view(x, self.builder.places[x].T)
        out = self.builder.unary("exp", turned)
        self.full.append(self.builder.view(out, self.builder.places[out].T))

    def _item(self) -> None:
        self.builder.item(self.sums[-1])

    def _foreach(self) -> None:
        xs = (self.full[-1], self.sums[-1])
        outs = [self.builder.value(self.builder.places[x], like=x) for x in xs]
        arguments = {"self": tuple(map(Ref, xs)), "scalar": 1.0}
        self.builder.op("aten._foreach_add_.NonTensor", arguments, outs)
        self.full.append(outs[0])
        self.sums.append(outs[1])

    def _cat(self) -> None:
        """Two put into one, of which a half goes on."""
        both = self.builder.cat(self.pick(), self.pick())
        self.full.append(self.builder.view(both, self.builder.places[both][:ROWS]))

    def _unknown(self) -> None:
        out = self.builder.value((ROWS, WIDTH))
        self.builder.op("nobody.knows", {"x": Ref(self.pick())}, [out])
        self.full.append(out)


@st.composite
def programs(draw: st.DrawFn) -> tuple[OpGraph, Builder]:
    """A graph, and the builder that knows which elements its ops touch."""
    program = Program(draw)
    for kind in draw(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=24)):
        program.add(kind)
    outputs = draw(st.lists(st.sampled_from(program.full), min_size=1, max_size=2, unique=True))
    return program.builder.graph(*outputs), program.builder
