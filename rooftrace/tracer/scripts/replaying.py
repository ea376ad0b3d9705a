"""CUDA graphs of a script: what a capture runs is no turn, and a replay is one, or a part of one."""

from __future__ import annotations

from typing import Literal

import torch

from rooftrace.tracer.scripts.calls import Look
from rooftrace.tracer.scripts.finding import Finder
from rooftrace.tracer.tape import META_KEY, Recorded

_LABEL = "CUDAGraph.replay()"


class Graphs:
    """Is told of captures and replays.  finder: has the turns of the script."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._seen = 0  # ops that were recorded before the replay that runs

    def told(self, event: Literal["capture", "captured", "replay", "replayed"]) -> None:
        """A capture or a replay begins, or has ended."""
        with torch._C.DisableTorchFunction():
            if event == "capture":
                self._finder.suspend()
            elif event == "captured":
                self._finder.resume()
            elif event == "replay" and not self._finder.suspended:
                self._finder.take_part(Look(_LABEL, plain=False), _LABEL)
                self._seen = len(self._finder.recorder.graph.nodes)
            elif event == "replayed" and not self._finder.suspended:
                self._finder.replayed(self._stepped())

    def _stepped(self) -> set[str]:
        """The classes of the optimizers whose ops were replayed."""
        found = set()
        for place, node in enumerate(self._finder.recorder.graph.nodes):
            noted = node.meta.get(META_KEY)
            if place >= self._seen and isinstance(noted, Recorded):
                origin = noted.origin
                if origin.part == "optimizer":
                    found.add(origin.function)
        return found
