"""One model of the suite, with random weights and inputs on any device; nothing is downloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SCALES = ("full", "small", "tiny")
Sizes = Mapping[str, int]
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SuiteModel:
    """One model of the suite: how it is built at each scale, and its inputs."""

    name: str
    kind: str  # the sort of model; a short budget is spread over the kinds
    settings: Mapping[str, Settings]  # by scale
    build: Callable[[Settings], nn.Module]
    # Keyword arguments for these sizes, made by `floats(*shape)` and `ids(below, *shape)`.
    inputs: Callable[[Settings, Sizes, Make], dict[str, Tensor]]
    steps: Mapping[str, Sequence[tuple[str, Sizes]]]  # phase and sizes, by scale, in order of worth
    library: str = ""  # what it needs beside torch
    channels_last: bool = False

    def dtype(self, device: str) -> torch.dtype:
        """The precision of its weights on this kind of device."""
        if device.startswith("cpu"):
            return torch.float32
        return torch.float16 if self.kind == "convolution" else torch.bfloat16

    def there(self) -> bool:
        """Whether its library is installed."""
        return not self.library or importlib.util.find_spec(self.library) is not None

    def made(self, scale: str, device: str, dtype: torch.dtype) -> nn.Module:
        """The module with random weights, for inference."""
        with _built_on(device, dtype), torch.random.fork_rng(devices=_generators(device)):
            torch.manual_seed(0)
            module = self.build(self.settings[scale]).eval()
        if self.channels_last:
            convert: Any = module.to
            convert(memory_format=torch.channels_last)
        return module


@dataclass(frozen=True)
class Make:
    """Makes input tensors on one device."""

    floats: Callable[..., Tensor]
    ids: Callable[..., Tensor]

    @staticmethod
    def on(device: str, dtype: torch.dtype, channels_last: bool = False) -> Make:
        """Random tensors; on meta only sizes, except token ids, whose values stay known."""
        layout = torch.channels_last if channels_last else torch.contiguous_format

        def floats(*shape: int) -> Tensor:
            made = torch.randn(*shape, device=device).to(dtype)
            return made.contiguous(memory_format=layout) if made.dim() == 4 else made

        def ids(below: int, *shape: int) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(below, shape, generator=generator)
            return drawn if device == "meta" else drawn.to(device)

        return Make(floats, ids)


@contextlib.contextmanager
def _built_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def _generators(device: str) -> list[int]:
    return [torch.device(device).index or 0] if device.startswith("cuda") else []
