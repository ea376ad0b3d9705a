"""What callbacks of all libraries share: a session of one training, and what it has to say."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rooftrace.errors import RequestError, hint
from rooftrace.measured.live import LiveResult, LiveSession

_OPTIONS = ("chip", "execution", "warmup", "profile", "kinds", "items", "graph", "clock")
_log = logging.getLogger("rooftrace")


class Watching:
    """Watches a training, and remembers what it reached.

    Only the first process watches: its figures are of one device.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise RequestError(
                    f"{name}={options[name]!r:.40}: expected {', '.join(_OPTIONS)}"
                    f"{hint(name, _OPTIONS)}"
                )
        self._options = dict(options)
        self._told: set[str] = set()
        self.live: LiveSession | None = None

    @property
    def result(self) -> LiveResult:
        """What the training reached so far.  Raises RequestError before it has begun."""
        if self.live is None:
            raise RequestError(
                "the result of a callback is there when training has begun, in the first process"
            )
        return self.live.result

    def __str__(self) -> str:
        return "no training has begun" if self.live is None else str(self.live)

    def begin_training(self, modules: Sequence[nn.Module], **more: Any) -> None:
        """Make the session of a training that begins."""
        self.live = LiveSession(modules, **{**more, **self._options})

    def logged(self) -> dict[str, float]:
        """The figures since the last time, by the names that loggers see."""
        if self.live is None:
            return {}
        figures = self.live.since_last().logged()
        for reason in self.live.book.refused:
            if reason not in self._told:
                self._told.add(reason)
                _log.warning("rooftrace: %s", reason)
        return figures

    def end_training(self) -> None:
        """The training has ended, or failed."""
        if self.live is not None:
            self.live.close()
