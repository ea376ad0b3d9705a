"""Tensors that are more than tensors: wrappers, packed weights, sparse, jagged and masked ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops
from .wrappers import FORWARD

aten = torch.ops.aten


class Int8Weight(Tensor):
    """Rows of int8 with a scale each; products dequantise first."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Int8Weight:
        return cls(inner["data8"], inner["scale"])

    def dequantize(self) -> Tensor:
        return self.data8.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].data8), func(args[0].scale))
        if func is aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return cls(args[0].data8.to(device), args[0].scale.to(device))
        plain = tree_map(lambda t: t.dequantize() if isinstance(t, cls) else t, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))


class Int4Weight(Tensor):
    """Two numbers a byte, and a scale for each group of four columns."""

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor, shape: torch.Size) -> Int4Weight:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=packed.device)

    def __init__(self, packed: Tensor, scale: Tensor, shape: torch.Size) -> None:
        self.packed, self.scale = packed, scale

    @classmethod
    def of(cls, weight: Tensor) -> Int4Weight:
        groups = weight.reshape(len(weight), -1, 4)
        scale = groups.abs().amax(-1, keepdim=True) / 7
        whole = ((groups / scale).round() + 8).to(torch.uint8).reshape(weight.shape)
        return cls(whole[:, ::2] << 4 | whole[:, 1::2], scale[..., 0], weight.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], self.shape

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Int4Weight:
        return cls(inner["packed"], inner["scale"], meta)

    def dequantize(self) -> Tensor:
        both = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(1)
        wide = both.to(self.scale.dtype).reshape(len(both), -1, 4) - 8
        return (wide * self.scale[..., None]).reshape(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            return F.linear(x, weight.dequantize(), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            self = args[0]
            return cls(func(self.packed), func(self.scale), self.shape)
        if func is aten._to_copy.default:
            device = (kwargs or {}).get("device")
            self = args[0]
            return cls(self.packed.to(device), self.scale.to(device), self.shape)
        raise NotImplementedError(f"{func} of an Int4Weight")


class Logged(Tensor):
    """Remembers which functions it went through."""

    names: list[str] = []  # noqa: RUF012 - shared by all, as people write it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.names.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(nn.Parameter):
    """A Parameter subclass with attributes that forward reads."""

    rows: int

    def __new__(cls, data: Tensor, rows: int) -> Named:
        self = super().__new__(cls, data, True)
        self.rows = rows
        return self


class Unit(Tensor):
    """A quantity: a plain tensor inside of an object that speaks __torch_function__ only."""

    inner: Tensor
    power: int

    @staticmethod
    def __new__(cls, inner: Tensor, power: int) -> Unit:
        self = torch.Tensor._make_subclass(cls, inner)
        self.power = power
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        powers = [a.power for a in args if isinstance(a, Unit)]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            return cls(out.as_subclass(Tensor), sum(powers))
        return out


@pattern
def int8_wrapper() -> Case:
    """A weight-only int8 subclass with inner tensors; __torch_dispatch__ dequantises."""
    model = mlp().requires_grad_(False)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Int8Weight.of(layer.weight.data), requires_grad=False)
    return Case(model, (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern
def int4_wrapper() -> Case:
    """Two weights a byte, unpacked by shifts in __torch_function__ of F.linear."""
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).requires_grad_(False)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Int4Weight.of(layer.weight.data), requires_grad=False)
    return Case(model, (torch.randn(7, 8),), expected=2 * 7 * (96 + 36))


@pattern
def logging_input() -> Case:
    """The input is a subclass that logs each function; everything that follows is one too."""
    return Case(mlp(), (torch.randn(7, 6).as_subclass(Logged),), expected=7 * FORWARD)


@pattern
def parameter_subclass() -> Case:
    """forward slices a weight by an attribute that its Parameter subclass carries."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Named(torch.randn(10, 6), rows=4)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight[: self.weight.rows].T

    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(Sliced(), (torch.randn(7, 6),), options=options, expected=2 * 2 * 7 * 24)


@pattern
def quantities() -> Case:
    """Units of measurement decide which of two layers runs."""

    class Physical(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 6), nn.Linear(5, 11)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out = a @ b
            layer = self.two if getattr(out, "power", 0) == 3 else self.one
            return layer(out.as_subclass(Tensor))

    a, b = Unit(torch.randn(7, 4), 1), Unit(torch.randn(4, 5), 2)
    return Case(Physical(), (a, b), expected=2 * 7 * (20 + 55))


@pattern
def jagged_attention() -> Case:
    """Sequences of unequal length in a nested tensor: linear, then padded for attention."""

    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = nn.Linear(6, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            padded = torch.nested.to_padded_tensor(self.project(x), 0.0)
            scores = torch.softmax(padded @ padded.transpose(1, 2), -1)
            return self.out(scores @ padded)

    parts = [torch.randn(n, 6) for n in (2, 5, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    flops = 2 * (10 * 72 + 2 * 3 * 25 * 12 + 15 * 36)
    return Case(Jagged(), (x,), expected=flops)


@pattern
def jagged_built_inside() -> Case:
    """The module makes its own nested tensor from values and offsets, and trains through it."""

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

        def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
            x = torch.nested.nested_tensor_from_jagged(values, offsets)
            return self.b(torch.relu(self.a(x))).values()

    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    data = torch.randn(11, 6), torch.tensor([0, 2, 7, 11])
    return Case(Ragged(), data, options=options, expected=mlp_flops(11))


@pattern
def sparse_adjacency() -> Case:
    """Graph convolution with a sparse COO matrix as a buffer, training the dense side."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            at = torch.tensor([[0, 1, 1, 3, 4], [2, 0, 4, 3, 1]])
            self.register_buffer("edges", torch.sparse_coo_tensor(at, torch.rand(5), (7, 7)))
            self.linear = nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges.coalesce(), self.linear(x))

    flops = 2 * 7 * 60 + 2 * 5 * 10
    return Case(Graph(), (torch.randn(7, 6),), expected=flops)


@pattern
def sparse_csr_weight() -> Case:
    """A pruned weight is stored as CSR, and F.linear is not used."""
    weight = torch.randn(10, 6)
    weight[weight.abs() < 0.8] = 0

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stored = nn.Parameter(weight.to_sparse_csr(), requires_grad=False)
            self.head = nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.stored @ x.T).T)

    flops = 2 * int((weight != 0).sum()) * 7 + 2 * 7 * 30
    return Case(Sparse(), (torch.randn(7, 6),), expected=flops)


@pattern
def weights_in_integer_buffers() -> Case:
    """GPTQ-style: 4-bit weights in int32 buffers, zero points and scales by group."""

    class Packed(nn.Module):
        def __init__(self, k: int, n: int, group: int = 8) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.randint(-(2**31), 2**31, (k // 8, n)).int())
            self.register_buffer("zeros", torch.randint(16, (k // group, n)).half())
            self.register_buffer("scales", torch.rand(k // group, n).half())
            self.register_buffer("groups", torch.arange(k) // group)
            self.register_buffer("shifts", torch.arange(0, 32, 4)[None, :, None].int())

        def forward(self, x: Tensor) -> Tensor:
            whole = (self.qweight[:, None] >> self.shifts) & 15
            whole = whole.reshape(-1, whole.shape[-1])
            weight = self.scales[self.groups] * (whole - self.zeros[self.groups])
            return x @ weight.to(x.dtype)

    model = nn.Sequential(Packed(16, 10), nn.GELU(), nn.Linear(10, 3))
    return Case(model, (torch.randn(7, 16),), expected=2 * 7 * (160 + 30))


@pattern
def masked_tensor() -> Case:
    """torch.masked: a subclass with data and mask goes through a reduction before a layer."""
    import warnings

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 10)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            from torch.masked import masked_tensor

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mean = masked_tensor(x, keep).mean(1).to_tensor(0.0)
            return self.linear(mean)

    return Case(Masked(), (torch.randn(4, 5, 6), torch.rand(4, 5, 6) > 0.4), expected=2 * 4 * 60)


@pattern
def inner_tensors_trained() -> Case:
    """A subclass that holds the parts of a low-rank weight, inside of a step that trains them."""

    class Factored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Parameter(torch.randn(10, 2))
            self.right = nn.Parameter(torch.randn(2, 6))

        @property
        def weight(self) -> Tensor:
            return (self.left @ self.right).as_subclass(Logged)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(
        Factored(), (torch.randn(7, 6),), options=options, expected=2 * (3 * 120 + 2 * 7 * 60)
    )
