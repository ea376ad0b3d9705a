"""What a planted finding is: two ways of one model, and how each is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HALF = torch.bfloat16


CHIP = "h100-sxm"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One side of a pair: a module, its inputs, and how it is run.

    make, inputs: called under a default device.  phase: forward or training (a unit gradient into
    the output, no optimizer, unless `train` steps itself).  train: a whole step of its own.
    execution: the preset and what it changes; tf32 also sets the switches of torch.  graph: whether
    the step is one CUDA graph.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    phase: str = "forward"
    train: Callable[..., Any] | None = None
    execution: Mapping[str, Any] = field(default_factory=dict)

    def built(self, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and its inputs on a device."""
        with torch.device(device):
            return self.make(), self.inputs()

    def step(self, device: str) -> Callable[[], Any]:
        """The step as a function without arguments."""
        torch.backends.cuda.matmul.allow_tf32 = bool(self.execution.get("tf32"))
        torch.backends.cudnn.allow_tf32 = bool(self.execution.get("tf32"))
        module, inputs = self.built(device)
        if self.train is not None:
            optimizer = optimizer_of(module, self.train)
            return lambda: self.train(module, optimizer, *inputs)  # type: ignore[misc]
        if self.phase == "training":

            def both() -> None:
                module.zero_grad()
                out = module(*inputs)
                out.backward(torch.ones_like(out))

            return both
        module.requires_grad_(False)
        if self.execution.get("dispatch") != "graph":
            return lambda: module(*inputs)
        module(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(*inputs)
        return graph.replay


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A finding.  lever: of the what-if that has to name it; said: a word of its action."""

    name: str
    lever: str
    said: str
    planted: Way
    mended: Way

    @property
    def line(self) -> str:
        """The line of the finding, "planted_calls.py:12"."""
        for file in sorted(Path(__file__).parent.glob("planted_*.py")):
            for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if text.endswith(f"# planted: {self.name}"):
                    return f"{file.name}:{number}"
        raise LookupError(f"no line ends with {self.name!r}")


def normal(*shape: int, dtype: torch.dtype = HALF) -> Callable[[], tuple[Tensor, ...]]:
    """One input of random numbers."""
    return lambda: (torch.randn(shape).to(dtype),)


def optimizer_of(module: nn.Module, train: Callable[..., Any]) -> torch.optim.Optimizer:
    """The optimizer that a step of its own takes."""
    fused, trained = train is not many_step, getattr(module, "student", module)
    return torch.optim.AdamW(trained.parameters(), lr=1e-4, foreach=not fused, fused=fused)


def many_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()  # planted: optimizer


def heads(keys: int, rows: int = 4096, queries: int | None = None) -> Any:
    """Query, key and value of 16 sequences."""
    shape = (16, 32, queries or rows, 128), (16, keys, rows, 128), (16, keys, rows, 128)
    return lambda: tuple(torch.randn(size).to(HALF) for size in shape)


def half(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(HALF)


def same(name: str, lever: str, said: str, way: Way, **mended: Any) -> Pair:
    """A pair whose sides differ in these fields alone."""
    from dataclasses import replace

    return Pair(name=name, lever=lever, said=said, planted=way, mended=replace(way, **mended))


ROWS = normal(8192, 4096, dtype=torch.float32)
