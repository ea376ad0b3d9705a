"""What a process of a pipeline does next."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("forward", "backward", "backward_input", "backward_weight")
"""backward computes both gradients; the last two compute that of the input and of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """One microbatch in one stage.

    together: whether it runs at the same time as the next action (forward and backward of two
    microbatches that overlap).
    """

    stage: int
    kind: str  # one of `KINDS`
    microbatch: int
    together: bool = False
