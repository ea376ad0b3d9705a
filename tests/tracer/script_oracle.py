"""A script twice: on a GPU that is not there, and for real on CPU tensors outside of any recorder.

The real run is counted by PyTorch's FlopCounterMode.  It takes attention apart, as the counter has
no formula for the fused kernel of a CPU; the fused kernels of a GPU do the same products, but for
what their backward computes a second time, which our counts keep apart.
"""

import contextlib
import gc
import io
import itertools
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost, TurnCost
from rooftrace.costmodels.ops import MATRIX
from tests.conftest import forget_accelerate

DENSE = ("useful", "masked", "masked_executed")


@dataclass
class Real:
    """What a run for real did.

    flops: of all of it.  marks: (class of the optimizer, FLOPs so far) at the end of each of its
    steps.  weights, states: bytes of each optimizer's parameters, and of the tensors that it keeps
    for them beside its counters of steps, which are on the host.
    """

    flops: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)
    weights: dict[int, int] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def steps(self, first: int = 1) -> list[int]:
        """FLOPs from one step of the optimizer that steps last to the next."""
        last = self.marks[-1][0]
        ends = [flops for key, flops in self.marks if key == last]
        return [after - before for before, after in itertools.pairwise(ends)]

    @property
    def trained(self) -> int:
        """How often the optimizer stepped that steps last."""
        return len(self.steps()) + 1


def really(path: Path, *words: str) -> Real:
    """Run a script on the CPU; its first argument is the device."""
    found = Real()
    counter = FlopCounterMode(display=False)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer.param_groups[0]["params"][0])
        found.marks.append((key, counter.get_total_flops()))
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        found.weights[key] = sum(map(_size, weights))
        found.states[key] = sum(
            _size(value)
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        )

    forget_accelerate()
    with contextlib.ExitStack() as undo:
        undo.enter_context(its_own_garbage())
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [str(path), "cpu", *words])
        undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
        undo.callback(register_optimizer_step_post_hook(stepped).remove)
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        with counter:
            runpy.run_path(str(path), run_name="__main__")
    found.flops = counter.get_total_flops()
    return found


@contextlib.contextmanager
def its_own_garbage() -> Iterator[None]:
    """Collects what was made inside, and does not walk through what was there before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def ours(path: Path, *words: str, steps: int | None = None, **options: Any) -> ScriptCost:
    """What the script costs on an A100 that is not there."""
    with contextlib.redirect_stdout(io.StringIO()):
        return rt.run([str(path), "cuda", *words], chip="a100-sxm-40", steps=steps, **options)


def matrix_flops(row: TurnCost, counts: Sequence[str] = DENSE) -> int:
    """FLOPs of matrix products and convolutions of one turn, over its pieces."""
    return sum(step.plan.total.flops(MATRIX, counts) * times for step, times in row.parts)


def all_flops(cost: ScriptCost, counts: Sequence[str] = DENSE) -> int:
    """The same of all turns of a script."""
    return sum(matrix_flops(row, counts) * row.turns for row in cost.rows)


def training(cost: ScriptCost) -> list[TurnCost]:
    return [row for row in cost.rows if row.kind == "training"]


def trained(cost: ScriptCost) -> int:
    """How many training steps were found."""
    return sum(row.turns for row in training(cost))


def held(row: TurnCost, role: str) -> int:
    """Bytes of one role at the peak of the piece in which the optimizer steps."""
    step = row.parts[-1][0]
    return int(getattr(step.memory, role))
