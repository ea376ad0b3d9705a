"""What a compiler was given and what it made of it: ops in order, kernels in launch order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """An op of the program, as it was before the compiler took it apart."""

    name: str  # "aten::native_layer_norm"
    module: str = ""  # "layers.0.norm"; "" of the root, or where the compiler does not know
    backward: bool = False


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One call of a kernel, which the compiler wrote or took from a library."""

    name: str  # "cpp_fused_gelu_view_1", "triton_poi_fused_add_0", "aten::addmm"
    # how many nodes of an op it computes, by the op's position in `CompiledGraph.ops`
    parts: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_library(self) -> bool:
        """Whether it is a call into a library, and not one that the compiler wrote."""
        return "::" in self.name


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """One graph that was compiled."""

    ops: tuple[ProgramOp, ...]  # in the order of the program
    kernels: tuple[CompiledKernel, ...]  # in launch order

    @property
    def backward(self) -> bool:
        """Whether it is the backward of another one."""
        return any(op.backward for op in self.ops)

    def homes(self) -> dict[int, int]:
        """The kernel that each op belongs to, by position.

        A library's kernel has the op that it is called for; what is written for it beside that
        only prepares its operands.  Of other kernels it is the first that has most of its nodes: a
        compiler computes cheap ops again in each kernel that reads them.
        """
        homes: dict[int, int] = {}
        most: dict[int, tuple[bool, int]] = {}
        for number, kernel in enumerate(self.kernels):
            for op, nodes in kernel.parts.items():
                share = kernel.is_library, nodes
                if share > most.get(op, (False, 0)):
                    homes[op], most[op] = number, share
        return homes


def call_name(name: str) -> str:
    """The name under which a profiler shows a kernel call of Inductor's.

    "aten::addmm" for "extern_kernels.addmm:3", "mkldnn::_linear_pointwise" for
    "torch.ops.mkldnn._linear_pointwise.default"; generated kernels keep theirs.
    """
    name = name.partition(":")[0]
    words = name.split(".")
    if words[0] == "extern_kernels":
        return f"aten::{words[1]}"
    if words[:2] == ["torch", "ops"]:
        words = words[2:]
    return f"{words[0]}::{words[1]}" if len(words) > 1 else name
