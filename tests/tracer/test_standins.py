"""What stands for a device while something is traced, and what is left of it: nothing."""

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.tracer.recording.recorder import Recorder
from rooftrace.tracer.targets.target import built

pytestmark = pytest.mark.quick

LIBRARY = """
from __future__ import annotations
import torch
from torch import Tensor, is_autocast_enabled
from torch.cuda import Event, Stream, current_device, current_stream, synchronize
from typing import get_type_hints

TABLE = torch.arange(4.0)

class Own(Stream):
    pass

def stream(given: Stream | None, event: Event | None = None) -> Stream | None:
    return given

HINTS = get_type_hints(stream)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name of a library that nobody has imported yet."""
    (tmp_path / "lazily_imported.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "lazily_imported"
    sys.modules.pop("lazily_imported", None)


def outside(library: Any) -> None:
    """A library that was imported inside is what it would be had it been imported before."""
    assert library.Stream is torch.cuda.Stream
    assert library.HINTS["given"] == torch.cuda.Stream | None
    assert library.TABLE.device.type == "cpu" and library.TABLE.tolist() == [0, 1, 2, 3]
    assert library.is_autocast_enabled("cpu") is False
    with torch.autocast("cpu"):  # asked for this device, not for the one of the trace
        assert library.is_autocast_enabled("cpu") and not library.is_autocast_enabled("cuda")
    if not torch.cuda.is_available():
        for call in (library.synchronize, library.current_device, library.Stream, library.Own):
            with pytest.raises((RuntimeError, AssertionError)):
                call()


def test_a_library_imported_while_building_stays_its_own(library: str) -> None:
    def build() -> Any:
        importlib.import_module(library)
        return nn.Linear(8, 8)

    assert next(built(build, "build", False, {}).parameters()).is_meta
    outside(sys.modules[library])


def test_a_library_imported_in_a_forward_stays_its_own(library: str, module: Any) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        found = importlib.import_module(library)
        return self.lin(x) + found.TABLE.sum()

    graph = rt.trace(module(forward), torch.ones(2, 8))
    assert any(op.name == "aten.addmm" for op in graph.ops)
    outside(sys.modules[library])


def test_streams_and_events_are_what_their_classes_say() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU answers for itself")
    if torch.version.cuda is not None:
        pytest.skip("in a build for a GPU these classes are written in C")
    before = dict(vars(torch.cuda.Stream)), dict(vars(torch.cuda.Event))
    recorder = Recorder(record=False)
    with recorder:
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        assert isinstance(stream, torch.cuda.Stream) and isinstance(event, torch.cuda.Event)
        assert isinstance(stream.record_event(), torch.cuda.Event)
        assert torch.cuda.current_stream() == stream and stream.device.type == "cuda"
        assert isinstance(pickle.loads(pickle.dumps(stream)), torch.cuda.Stream)
        stream.wait_event(event)
        event.record(stream)
        assert event.query() and f"{event.elapsed_time(event):.1f}"
        with (
            torch.cuda.device(1),
            torch.cuda.stream(stream),
            torch.cuda.device(torch.device("cuda")),
        ):
            torch.cuda.synchronize()
    assert (dict(vars(torch.cuda.Stream)), dict(vars(torch.cuda.Event))) == before


def test_no_finder_is_left_behind() -> None:
    before = list(sys.meta_path)
    rt.trace(nn.Linear(8, 8), torch.ones(2, 8))
    assert sys.meta_path == before
