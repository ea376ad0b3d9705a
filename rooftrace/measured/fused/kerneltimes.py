"""The measured time of one kernel of a compiled step, and the ops that it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The time of one kernel of a compiled step, launched once; or of a call beside it.

    Ops are those of the graph of that step, written out, as the execution model `compiled` runs it.
    """

    name: str  # "triton_poi_fused_add_0", "cpp_fused_gelu_view_1", "aten::addmm"
    seconds: float  # s
    ops: tuple[int, ...] = ()  # ids of the ops that it computes
    targets: tuple[str, ...] = ()  # their full names, "aten.gelu.default"
    parts: tuple[int, ...] = ()  # ids of ops of which it computes a part, for another kernel
    compiled: bool = False  # whether it is in a graph that was compiled

    @property
    def generated(self) -> bool:
        """Whether the compiler wrote it; others are calls into a library."""
        return self.compiled and "::" not in self.name
