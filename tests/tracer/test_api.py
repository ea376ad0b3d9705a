"""The tracer's front door."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.tracer.inputs.calls import floating_input
from rooftrace.tracer.phases import collector_paused


def test_what_a_trace_made_can_be_freed(model: Callable[..., Any]) -> None:
    class Watched(nn.Linear):
        pass

    copies = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        copies.extend(weakref.ref(o) for o in gc.get_objects() if type(o) is Watched)
        return output.sum()

    module, frozen = Watched(8, 8), gc.get_freeze_count()
    rt.trace(module, torch.ones(1, 8), phase="training", loss=loss)
    gc.collect()
    assert len(copies) == 2  # the user's module and its copy on meta
    assert [ref() for ref in copies if ref() is not None] == [module]
    assert gc.get_freeze_count() <= frozen  # what an earlier program set aside stays so


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_floating_input_has_the_precision_of_the_weights() -> None:
    x = floating_input(nn.Linear(8, 8, dtype=torch.bfloat16), (2, 8))
    assert (x.shape, x.dtype, x.device.type) == ((2, 8), torch.bfloat16, "meta")
    assert floating_input(nn.ReLU(), (3,)).dtype == torch.float32
