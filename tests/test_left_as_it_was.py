"""Every public function that runs or traces a module of the user's leaves it, and torch, as before.

Also where the module fails, and where functions stand inside of one another.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt


class Stateful(nn.Module):
    """Statistics, dropout, numbers of three generators, a frozen weight, a hook and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))
        self.body[0].weight.grad = torch.ones(8, 8)
        self.body[1].register_forward_hook(lambda module, args, out: out + 0)
        self.body[2].eval()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.seen += x.detach().sum(0)
        noise = torch.randn_like(x) + random.random() + numpy.random.rand()
        if fail:
            raise ValueError("as asked")
        return self.head(self.body(x + noise))


def picture(module: nn.Module, *tensors: Tensor) -> dict[str, Any]:
    """What a user could see of a module, its inputs and torch."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own |= {f"input {i}": tensor for i, tensor in enumerate(tensors)}
    parts = dict(module.named_modules())
    return {
        "identity": {name: id(t) for name, t in own.items()},
        "value": {name: t.detach().tolist() for name, t in own.items()},
        "marks": {name: sorted(t.__dict__) for name, t in own.items()},
        "gradient": {name: None if t.grad is None else (id(t.grad), t.grad.tolist())
                     for name, t in own.items()},
        "requires_grad": {name: t.requires_grad for name, t in own.items()},
        "training": {path: part.training for path, part in parts.items()},
        "attributes": {path: sorted(vars(part)) for path, part in parts.items()},
        "hooks": {path: [list(part._forward_hooks), list(part._forward_pre_hooks),
                         list(part._backward_hooks)] for path, part in parts.items()},
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": tuple(map(str, numpy.random.get_state())),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "modes": torch._C._len_torch_dispatch_stack(),
        "functions": torch._C._len_torch_function_stack(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def inside(module: nn.Module, x: Tensor, **more: Any) -> None:
    with rt.capture(module):
        module(x, **more).sum().backward()


def step(module: nn.Module, x: Tensor, **more: Any) -> None:
    module(x, **more).sum().backward()


def measured(module: nn.Module, x: Tensor, **more: Any) -> None:
    phase = more.pop("phase", "forward")
    rt.measure(module, x, phase=phase, budget_s=0.2, **more)


FOLDER = [""]
CALLS: dict[str, Callable[..., Any]] = {
    "trace": rt.trace,
    "trace training": lambda m, x, **k: rt.trace(m, x, phase="training", **k),
    "trace a step": lambda m, x, **k: rt.trace(step, m, x, **k),
    "estimate": lambda m, x, **k: rt.estimate(m, x, chip="l4", **k),
    "capture": inside,
    "compare": rt.compare,
    "compare training": lambda m, x, **k: rt.compare(m, x, phase="training", **k),
    "compare fvcore": lambda m, x, **k: rt.compare(m, x, peers=("fvcore",), **k),
    "diff": lambda m, x, **k: rt.diff(m, m, x, **k),
    "inventory": lambda m, x, **k: rt.inventory(m),
    "dump_model_info": lambda m, x, **k: rt.dump_model_info(
        m, report_path=FOLDER[0], input_data=x, plot_distributions=False
    ),
    "breaks": rt.graph_breaks,
    "measure": measured,
    "measure training": lambda m, x, **k: measured(m, x, phase="training", **k),
    "measure compiled": lambda m, x, **k: measured(m, x, compiled=True, ops=False, **k),
    "profile": lambda m, x, **k: rt.profile(m, (x,), **k),
    "summary": lambda m, x, **k: rt.summary(m, input_data=x, **k),
    "flop_count_table": lambda m, x, **k: rt.flop_count_table(m, x, **k),
    "largest_batch": lambda m, x, **k: rt.largest_batch(
        m, x, chip="l4", phases=["forward"], **k
    ),
    "report": lambda m, x, **k: rt.report(m, x, chip="l4", **k),
    "guidance": lambda m, x, **k: rt.guidance(rt.estimate(m, x, **k)),
    "sensitivity": lambda m, x, **k: rt.sensitivity(m, x, **k),
    "explain": lambda m, x, **k: rt.explain(m, x, **k),
    "form": lambda m, x, **k: rt.form(m, x, **k),
    "sweep": lambda m, x, **k: rt.sweep(m, x, over={"batch": (4, 8)}, **k),
    "solve": lambda m, x, **k: rt.solve(m, x, find="batch", chip="l4", **k),
}


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_all_as_it_was(name: str, fail: bool) -> None:
    module, x = Stateful(), torch.randn(4, 8)
    before = picture(module, x)
    more = {"fail": True} if fail else {}
    with contextlib.suppress(Exception):
        CALLS[name](module, x, **more)
    after = picture(module, x)
    changed = [key for key, value in before.items() if after[key] != value]
    assert not changed, changed
