"""Cells: where a step is among the steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rooftrace._plain import Plain
from rooftrace.hardware.precisions import compute_family

if TYPE_CHECKING:
    from rooftrace.hardware import Chip

GENERATIONS = ("ampere", "hopper", "blackwell", "geforce", "cdna3", "cdna4", "older", "cpu")
"""Kinds of chips.  geforce: the multiprocessors of sm_86, sm_89 and sm_120, also of L4 and L40S."""
PRECISIONS = ("fp32", "tf32", "half", "fp8", "fp4", "int4")
"""Of most of the matrix FLOPs.  int4: weights alone are narrow."""
WIDE = ("fp32", "tf32", "half")
"""Precisions of products whose weights may alone be narrow."""
PHASES = ("kernel", "forward", "decode", "training")
"""kernel: one kernel, or one layer, by itself."""
EXECUTIONS = ("eager", "compiled", "graph")
WORKS = ("product", "attention", "moe", "mla", "convolution", "other")
"""The kinds of kernels that may take most of the time."""
LIMITS = ("compute", "memory", "launch", "network")

_ARCHITECTURES = {
    "sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "sm_103": "blackwell",
    "sm_86": "geforce", "sm_87": "geforce", "sm_89": "geforce", "sm_120": "geforce",
    "sm_121": "geforce", "gfx942": "cdna3", "gfx950": "cdna4",
}  # fmt: skip
_FAMILIES = {"bf16": "half", "fp16": "half", "int8": "fp8"}
_OF_REGIME = {"hbm": "memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCell(Plain):
    """Where a step, or a kernel, is; "" of what is unknown."""

    generation: str = ""  # one of GENERATIONS
    precision: str = ""  # one of PRECISIONS
    phase: str = ""  # one of PHASES
    execution: str = ""  # one of EXECUTIONS
    work: str = ""  # one of WORKS
    limit: str = ""  # one of LIMITS

    KEYS = "generation precision phase execution work limit"

    def __str__(self) -> str:
        return ", ".join(value for f in fields(self) if (value := getattr(self, f.name)))

    @staticmethod
    def generation_of(chip: Chip) -> str:
        """The generation of a chip; "" where its file does not name the architecture."""
        if chip.kind == "cpu":
            return "cpu"
        architecture = chip.architecture.partition(":")[0]
        return _ARCHITECTURES.get(architecture, "older") if architecture else ""

    @staticmethod
    def precision_of(name: str) -> str:
        """The precision of a cell for a number format that products compute in."""
        family = compute_family(name)
        return _FAMILIES.get(family, family)

    @staticmethod
    def at(chip: Chip, phase: str, fusion: str, dispatch: str) -> StepCell:
        """The part of a cell that a chip, the phase of a graph and an execution model say."""
        return StepCell(
            generation=StepCell.generation_of(chip),
            phase=phase if phase in PHASES else "forward",
            execution="graph"
            if dispatch == "graph"
            else "eager"
            if fusion == "none"
            else "compiled",
        )

    @staticmethod
    def limit_of(regime: str) -> str:
        """The limit of a cell for the regime of a step."""
        return _OF_REGIME.get(regime, regime)

    @staticmethod
    def work_of(kind: str, of_experts: bool = False, latent: bool = False) -> str:
        """The work of a cell for a class of kernels.

        of_experts: whether it computes experts; latent: whether attention runs on latents.
        """
        if of_experts or kind == "grouped mm":
            return "moe"
        if kind == "attention":
            return "mla" if latent else "attention"
        if "conv" in kind:
            return "convolution"
        return "product" if kind.endswith("mm") else "other"
