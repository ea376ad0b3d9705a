"""GradScaler on a device that is not there: no gradient is infinite, and that is said."""

from __future__ import annotations

from typing import Any

import torch

from rooftrace.tracer.emulation.state import Emulation
from rooftrace.tracer.patches import original_of


def methods(here: Emulation) -> dict[str, Any]:
    """Methods of `torch.amp.GradScaler`, which the older classes inherit."""
    step = original_of(torch.amp.GradScaler, "step")

    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            here.assume(
                "found_inf",
                "GradScaler finds no inf or nan in gradients: no step is skipped, and the scale "
                "grows as it does then",
            )
        return step(self, optimizer, *args, **kwargs)

    return {"step": stepped}
