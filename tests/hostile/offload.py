"""Weights that are not where the module is until it runs."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops
from .wrappers import FORWARD


@pattern
def streamed_by_hooks() -> Case:
    """Pre-hooks fill empty parameters from a dict on the CPU, and hooks empty them afterwards."""
    model = mlp()
    store = {k: v.detach().clone() for k, v in model.state_dict().items()}

    for prefix, layer in model.named_children():
        if not list(layer.parameters()):
            continue

        def load(module: nn.Module, args: Any, prefix: str = prefix) -> None:
            for name, p in module.named_parameters():
                p.data = store[f"{prefix}.{name}"].clone()

        def drop(module: nn.Module, args: Any, out: Any) -> None:
            for p in module.parameters():
                p.data = torch.empty(0)

        layer.register_forward_pre_hook(load)
        layer.register_forward_hook(drop)
        for p in layer.parameters():
            p.data = torch.empty(0)
    return Case(model.requires_grad_(False), (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern
def loaded_from_a_file() -> Case:
    """Each layer is read by torch.load in forward; the module holds one layer's skeleton only."""

    class OnDisk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skeleton = nn.Linear(6, 6)
            self.files = []
            for _ in range(3):
                file = io.BytesIO()
                torch.save(nn.Linear(6, 6).state_dict(), file)
                self.files.append(file.getvalue())

        def forward(self, x: Tensor) -> Tensor:
            for file in self.files:
                self.skeleton.load_state_dict(torch.load(io.BytesIO(file)))
                x = torch.tanh(self.skeleton(x))
            return x

    return Case(OnDisk().requires_grad_(False), (torch.randn(7, 6),), expected=3 * 2 * 7 * 36)


@pattern
def functional_streaming() -> Case:
    """A skeleton on meta gets the weights of each layer in turn, from a plain dict of tensors."""
    with torch.device("meta"):
        skeleton = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    skeleton.eval()
    layers = []
    for _ in range(2):
        real = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        layers.append({k: v.detach() for k, v in real.named_parameters()})

    class Streamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for weights in layers:
                x = functional_call(skeleton, weights, (x,))
            return self.head(x)

    tokens = 2 * 5
    layer = 2 * tokens * (8 * 24 + 64 + 2 * 96) + 4 * 2 * 2 * 25 * 4
    return Case(Streamed(), (torch.randn(2, 5, 8),), expected=2 * layer + 2 * tokens * 24)


@pattern
def swapped_tensors() -> Case:
    """torch.utils.swap_tensors exchanges a parameter with a larger one, and back."""

    class Swapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4, bias=False)
            self.other = nn.Parameter(torch.randn(10, 6))

        def forward(self, x: Tensor) -> Tensor:
            torch.utils.swap_tensors(self.linear.weight, self.other)
            try:
                return self.linear(x)
            finally:
                torch.utils.swap_tensors(self.linear.weight, self.other)

    with torch.no_grad():
        return Case(Swapped().requires_grad_(False), (torch.randn(7, 6),), expected=2 * 7 * 60)


@pattern
def optimizer_state_elsewhere() -> Case:
    """ZeRO-Offload by hand: fp32 masters and an optimizer of their own, copied both ways."""
    model = mlp().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.to("cpu", torch.float32)
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        return loss

    x = torch.randn(7, 6, dtype=torch.bfloat16)
    return Case(step, (model, optimizer, x), expected=mlp_flops(7))


@pattern
def moved_between_devices() -> Case:
    """Layers are moved by `.to` in forward, their outputs too, with a buffer for the round trip."""

    class Moved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                layer.to(x.device)
                x = layer(x.to(next(layer.parameters()).device, non_blocking=True)).cpu()
            return x

    return Case(Moved(), (torch.randn(7, 6),), expected=3 * 2 * 7 * 36)


@pattern(needs=("accelerate",))
def accelerate_cpu_offload() -> Case:
    """accelerate's hooks keep weights on meta and set them from a dict before each forward."""
    from accelerate import cpu_offload

    model = mlp().requires_grad_(False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    return Case(model, (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern(needs=("accelerate",))
def accelerate_disk_offload() -> Case:
    """Weights are memory-mapped from files by accelerate, layer by layer."""
    import tempfile

    from accelerate import disk_offload

    folder = tempfile.TemporaryDirectory()
    model = mlp().requires_grad_(False)
    disk_offload(model, folder.name, execution_device=torch.device("cpu"))
    vars(model)["folder"] = folder  # it goes with the model
    return Case(model, (torch.randn(7, 6),), expected=7 * FORWARD)
