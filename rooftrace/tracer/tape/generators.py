"""The interface of random generators that belong to one recording."""

from __future__ import annotations

from typing import Any, Protocol


class Generators(Protocol):
    """Generators that stand for those of the process, in the threads of a recording."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the host that draws random numbers."""

    def states(self) -> Any:
        """What was drawn so far: equal only where nothing was drawn between."""
