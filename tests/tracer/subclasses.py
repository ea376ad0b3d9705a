"""Weights stored in 4 bits behind tensors of a class of their own, as people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP = 32


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(two 4-bit values in a byte [N, K / 2], a scale for every GROUP of them [N, K / GROUP])."""
    n, k = weight.shape
    groups = weight.reshape(n, k // GROUP, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 7
    whole = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8).reshape(n, k)
    return whole[:, ::2] | (whole[:, 1::2] << 4), scale.squeeze(-1).to(weight.dtype)


def dequantized(packed: Tensor, scale: Tensor) -> Tensor:
    n = packed.shape[0]
    whole = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(n, -1, GROUP)
    return ((whole.to(scale.dtype) - 8) * scale.unsqueeze(-1)).reshape(n, -1)


def shape_of(packed: Tensor) -> tuple[int, int]:
    return packed.shape[0], 2 * packed.shape[1]


class Hollow(Tensor):
    """Has a shape and no bytes: ops come to `__torch_dispatch__`, its tensors are attributes."""

    packed: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape_of(packed), dtype=scale.dtype, device=packed.device
        )

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0].scale)
        if func is torch.ops.aten.t.default:
            return dequantized(args[0].packed, args[0].scale).t()
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class Flattened(Hollow):
    """As PyTorch wants it: it flattens."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], {"device": self.device}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        assert context["device"] == inner["packed"].device
        return cls(inner["packed"], inner["scale"])


class Packed(Tensor):
    """The packed bytes themselves, with their scales as an attribute; takes over F.linear."""

    scale: Tensor

    @staticmethod
    def of(packed: Tensor, scale: Tensor) -> Packed:
        made = packed.as_subclass(Packed)
        made.scale = scale
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            return F.linear(x, dequantized(weight.as_subclass(Tensor), weight.scale))
        return super().__torch_function__(func, types, args, kwargs or {})


class State:
    """What a library keeps beside a packed weight."""

    def __init__(self, scale: Tensor, module: nn.Module) -> None:
        self.scale, self.module, self.used = scale, module, 0


class PackedParameter(nn.Parameter):
    """A parameter of packed bytes, with an object that holds the scales and names its layer."""

    state: State

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("copies of packed weights are not made")


class Linear4(nn.Module):
    """F.linear of a weight that knows what to do."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        if isinstance(weight, Packed):
            self.weight.scale = weight.scale  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LinearOfParameter(nn.Module):
    """Dequantises its parameter by what is beside it."""

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = PackedParameter(packed, requires_grad=False)
        self.weight.state = State(scale, self)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.weight) is PackedParameter and self.weight.state.module is self
        self.weight.state.used += 1
        return x @ dequantized(self.weight, self.weight.state.scale).t()


class LinearOfBuffers(nn.Module):
    """Dequantises its buffers."""

    packed: Tensor
    scale: Tensor

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ dequantized(self.packed, self.scale).t()


class LinearOfAttribute(nn.Module):
    """An ordinary parameter, whose scales are an attribute of it."""

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.scale = scale  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x @ dequantized(self.weight, self.weight.scale).t()  # type: ignore[arg-type]


WAYS = {
    "flattened": lambda packed, scale: Linear4(Flattened(packed, scale)),
    "hollow": lambda packed, scale: Linear4(Hollow(packed, scale)),
    "torch function": lambda packed, scale: Linear4(Packed.of(packed, scale)),
    "parameter": LinearOfParameter,
    "buffers": LinearOfBuffers,
    "attribute": LinearOfAttribute,
}
"""Layers made of packed bytes and scales."""


def layers(way: str, width: int = 256, count: int = 3) -> nn.Sequential:
    """`count` equal layers of width x width, of random weights in bf16 before they are packed."""
    torch.manual_seed(0)
    weights = [torch.randn(width, width, dtype=torch.bfloat16) for _ in range(count)]
    return nn.Sequential(*(WAYS[way](*quantized(weight)) for weight in weights))
