"""Hand-made graphs: values are arrays of element numbers, so that views know what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op, Ref, Tensor, refs


class Builder:
    """Makes an OpGraph op by op; every method returns value ids."""

    def __init__(self, dtype: str = "bf16") -> None:
        self.dtype = dtype
        self.values: list[Tensor] = []
        self.places: list[np.ndarray] = []
        self.numbered: dict[int, np.ndarray] = {}  # the elements of a tensor of each size
        self.ops: list[Op] = []
        self.inputs: list[int] = []
        self.unread: dict[int, tuple[int, ...]] = {}

    # -- values ------------------------------------------------------------------------------------

    def value(
        self,
        place: np.ndarray | Sequence[int],
        role: str = "activations",
        like: int | None = None,
        dtype: str | None = None,
        name: str = "",
    ) -> int:
        """A new value: of a shape, or a numpy view of what `like` stands for."""
        index = len(self.values)
        if not isinstance(place, np.ndarray):
            size = int(np.prod(place, dtype=int))
            if size not in self.numbered:
                self.numbered[size] = np.arange(size, dtype=np.int32)
            place = self.numbered[size].reshape(tuple(place))
        owner = index if like is None else self.values[like].storage
        stride = tuple(step // place.itemsize for step in place.strides)
        role = role if like is None else self.values[owner].role
        kind = dtype or (self.dtype if like is None else self.values[like].dtype)
        self.values.append(Tensor(place.shape, kind, stride, role, owner, name))
        self.places.append(place)
        return index

    def input(self, *shape: int, role: str = "activations", **options: Any) -> int:
        index = self.value(shape, role, **options)
        self.inputs.append(index)
        return index

    def weight(self, *shape: int, name: str = "") -> int:
        return self.value(shape, "weights", name=name)

    # -- ops ---------------------------------------------------------------------------------------

    def op(
        self,
        target: str,
        arguments: Mapping[str, Any],
        outputs: Sequence[int],
        kind: str = "kernel",
        unread: Sequence[int] = (),
        **fields: Any,
    ) -> None:
        """Any op; `unread` are arguments that it only writes into."""
        named = target if target.count(".") == 2 else f"{target}.default"
        index = len(self.ops)
        inputs = tuple(refs(arguments))
        self.ops.append(
            Op(index, named, dict(arguments), inputs, tuple(outputs), kind=kind, **fields)
        )
        self.unread[index] = tuple(unread)

    def reads(self, op: int) -> set[tuple[int, int]]:
        """(storage, element) pairs that an op reads."""
        inputs = [i for i in self.ops[op].inputs if i not in self.unread[op]]
        return {e for i in inputs for e in self.elements(i)}

    def writes(self, op: int) -> set[tuple[int, int]]:
        return {e for i in self.ops[op].outputs for e in self.elements(i)}

    def elements(self, index: int) -> set[tuple[int, int]]:
        storage = self.values[index].storage
        return {(storage, int(e)) for e in self.places[index].reshape(-1)}

    def mm(self, a: int, b: int, **fields: Any) -> int:
        out = self.value((self.values[a].shape[0], self.values[b].shape[1]))
        self.op("aten.mm", {"self": Ref(a), "mat2": Ref(b)}, [out], **fields)
        return out

    def unary(self, name: str, x: int, **fields: Any) -> int:
        out = self.value(self.values[x].shape, fields.pop("role", "activations"))
        self.op(f"aten.{name}", {"self": Ref(x)}, [out], **fields)
        return out

    def binary(self, name: str, x: int, y: int | float, **fields: Any) -> int:
        shape = self.values[x].shape
        if not isinstance(y, float):
            shape = np.broadcast_shapes(shape, self.values[y].shape)
        out = self.value(shape)
        other = y if isinstance(y, float) else Ref(y)
        self.op(f"aten.{name}.Tensor", {"self": Ref(x), "other": other}, [out], **fields)
        return out

    def in_place(self, name: str, x: int, **fields: Any) -> int:
        out = self.value(self.places[x], like=x)
        self.op(f"aten.{name}", {"self": Ref(x)}, [out], **fields)
        return out

    def copy_into(self, x: int, source: int, **fields: Any) -> int:
        out = self.value(self.places[x], like=x)
        arguments = {"self": Ref(x), "src": Ref(source)}
        self.op("aten.copy_", arguments, [out], unread=[x], **fields)
        return out

    def softmax(self, x: int, **fields: Any) -> int:
        out = self.value(self.values[x].shape)
        arguments = {"self": Ref(x), "dim": -1, "half_to_float": False}
        self.op("aten._softmax", arguments, [out], **fields)
        return out

    def layer_norm(self, x: int, weight: int, bias: int) -> int:
        rows, width = self.values[x].shape
        outputs = [self.value(shape) for shape in ((rows, width), (rows, 1), (rows, 1))]
        arguments = {
            "input": Ref(x), "normalized_shape": (width,), "weight": Ref(weight),
            "bias": Ref(bias), "eps": 1e-5,
        }  # fmt: skip
        self.op("aten.native_layer_norm", arguments, outputs)
        return outputs[0]

    def sum(self, x: int, dim: int = 1, **fields: Any) -> int:
        shape = list(self.values[x].shape)
        shape[dim] = 1
        out = self.value(shape)
        arguments = {"self": Ref(x), "dim": (dim,), "keepdim": True}
        self.op("aten.sum.dim_IntList", arguments, [out], **fields)
        return out

    def cat(self, *xs: int) -> int:
        shapes = [self.values[x].shape for x in xs]
        out = self.value((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        self.op("aten.cat", {"tensors": tuple(map(Ref, xs)), "dim": 0}, [out])
        return out

    def sort(self, x: int) -> int:
        shape = self.values[x].shape
        outputs = [self.value(shape), self.value(shape, dtype="int64")]
        self.op("aten.sort", {"self": Ref(x)}, outputs)
        return outputs[0]

    def view(self, x: int, place: np.ndarray) -> int:
        out = self.value(place, like=x)
        self.op("aten.as_strided", {"self": Ref(x)}, [out], kind="view")
        return out

    def item(self, x: int) -> None:
        self.op("aten._local_scalar_dense", {"self": Ref(x)}, [], kind="sync")

    def graph(self, *outputs: int, phase: str = "forward", **fields: Any) -> OpGraph:
        return OpGraph(
            phase, tuple(self.values), tuple(self.ops), tuple(self.inputs), outputs, **fields
        ).verify()
