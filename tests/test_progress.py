"""What a call is doing is told to its own listener, whatever thread the others are in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace._progress import tell

pytestmark = pytest.mark.quick


def test_a_listener_hears_what_calls_inside_do() -> None:
    heard: list[str] = []
    with rt.telling(heard.append):
        rt.report(nn.Linear(8, 8), torch.ones(2, 8), chip="l4", execution="eager")
    rt.trace(nn.Linear(8, 8), torch.ones(2, 8))  # nobody listens any more
    assert heard == [
        "tracing forward",
        "tracing training",
        "forward, eager",
        "training, eager",
    ]


def test_the_progress_of_a_call_goes_before_that_of_its_block() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with rt.telling(outer.append):
        rt.largest_batch(nn.Linear(8, 8), torch.ones(2, 8), chip="l4", progress=inner.append)
        assert inner and not outer
        with rt.telling(None):
            tell("again")
    assert outer == ["again"]


def test_threads_have_listeners_of_their_own() -> None:
    together = Barrier(2)

    def told(name: str) -> list[str]:
        heard: list[str] = []
        with rt.telling(heard.append):
            together.wait()
            tell(name)
            together.wait()
        return heard

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(told, ["one", "two"])) == [["one"], ["two"]]
