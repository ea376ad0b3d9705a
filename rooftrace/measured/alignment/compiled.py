"""Kernels of a compiled step matched with ops of a graph: by order, library calls and data flow."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph
from rooftrace.measured.alignment import keys
from rooftrace.measured.profiles import records


@dataclass(frozen=True, slots=True)
class ProgramOp:
    """An op of the program, before the compiler decomposed it."""

    name: str  # "aten::native_layer_norm"
    module: str = ""  # "layers.0.norm"; "" of the root, or unknown
    backward: bool = False


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One call of a kernel, which the compiler wrote or took from a library."""

    name: str  # "cpp_fused_gelu_view_1", "triton_poi_fused_add_0", "aten::addmm"
    # {position of an op in `CompiledGraph.ops`: number of its nodes that the kernel computes}
    parts: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_library(self) -> bool:
        """Whether it is a call into a library: the compiler did not write it."""
        return "::" in self.name


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """One graph that was compiled."""

    ops: tuple[ProgramOp, ...]  # in the order of the program
    kernels: tuple[CompiledKernel, ...]  # in launch order

    @property
    def backward(self) -> bool:
        """Whether it is the backward of another graph."""
        return any(op.backward for op in self.ops)

    def homes(self) -> dict[int, int]:
        """The kernel that each op belongs to, by position.

        A library kernel has the op that it is called for; kernels before it only prepare operands.
        Of other kernels it is the first with most nodes of the op: a compiler computes cheap ops
        again in each kernel that reads them.
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
    """The name under which a profiler shows a kernel call of Inductor.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The time of one launch in a compiled step: of a kernel, or of a call outside of the graphs.

    Ops are of the expanded graph of the step, as the execution model `compiled` runs it.
    """

    name: str  # "triton_poi_fused_add_0", "cpp_fused_gelu_view_1", "aten::addmm"
    seconds: float  # s
    ops: tuple[int, ...] = ()  # ids of the ops that it computes
    targets: tuple[str, ...] = ()  # their full names, "aten.gelu.default"
    parts: tuple[int, ...] = ()  # ids of ops of which it computes a part, for another kernel
    compiled: bool = False  # whether it is in a graph that was compiled

    @property
    def generated(self) -> bool:
        """Whether the compiler wrote it; other kernels are calls into a library."""
        return self.compiled and "::" not in self.name


# -- calls into libraries --------------------------------------------------------------------------

_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "linear_pointwise",
        "mkl_linear",
        "addmm_activation",
        "int_mm",
    ]
)
_WITH_BIAS = frozenset({"addmm", "baddbmm", "addmm_activation"})
_OPERANDS = {"convolution": 2, "convolution_backward": 3}
"""Tensors that distinguish two calls of a family; of other families it is the first."""
_FAMILIES = {
    "convolution_pointwise": "convolution",
    "cudnn_convolution": "convolution",
    "miopen_convolution": "convolution",
    "cudnn_convolution_add_relu": "convolution",
    "cudnn_convolution_relu": "convolution",
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}
_KERNELS = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("attention_backward", r"(flash|fmha|attention|sdp|attn).*(bwd|backward)|bwd_kernel_d[kq]"),
        (
            "attention",
            r"flash|fmha|attention|_sdp|attn_fwd|\bpa_(fwd|decode)|mla_(a8w8|decode|fwd)",
        ),
        ("convolution_backward", r"dgrad|wgrad|bwd_(data|weight)|igemm_(bwd|wrw)|conv.*bwd"),
        (
            "convolution",
            r"fprop|conv|igemm_fwd|miopen|SubTensorOpWithScalar1d|batched_transpose_\d|winograd",
        ),
        (
            "product",
            r"gemm|cutlass|cublas|cijk|nvjet|xmma|matmul|gemv|flatmm|wvSplitK|Device\w*Gemm|_mm_",
        ),
    )
)
"""The family of a library kernel by its name, where no op of the host names it.

Names of ROCm's libraries: attn_fwd and bwd_kernel_dk_dv of AOTriton, ck_tile::FmhaFwdKernel,
AITER's fmha_fwd, pa_fwd and mla_decode, paged_attention_ll4mi of vLLM; Cijk_ of Tensile (rocBLAS,
hipBLASLt), kernel_gemm_xdl of CK, flatmm and wvSplitK; igemm_fwd_gtcx3 and layouts of MIOpen."""


def family(name: str) -> str:
    """One name for interchangeable ops: "product" for "aten::mm" and "aten::addmm"."""
    plain = keys.common_name(name).rpartition("::")[2].strip("_")
    return "product" if plain in _PRODUCTS else _FAMILIES.get(plain, plain)


def kernel_family(name: str) -> str:
    """The family of a library kernel by its name; "": unknown."""
    if "::" in name and "(" not in name and "<" not in name:
        return family(name)
    return next((family for family, pattern in _KERNELS if pattern.search(name)), "")


def operands(name: str, shapes: Sequence[records.Shape]) -> keys.Key:
    """A key by which calls and ops of one family with equal operands are equal."""
    group = family(name)
    plain = keys.common_name(name).rpartition("::")[2].strip("_")
    if group == "product":
        left = shapes[plain in _WITH_BIAS :]
        if len(left) < 2 or not left[0] or not left[1]:
            return group, ()
        a, b = left[0], left[1]
        columns = b[0] if plain.startswith(("linear", "mkl_linear")) else b[-1]
        return group, ((math.prod(a[:-1]), a[-1], columns),)
    return group, tuple(shapes[: _OPERANDS.get(group, 1)])


def paired(
    called: Sequence[tuple[int, keys.Key]], ops: Sequence[tuple[int, keys.Key]]
) -> dict[int, int]:
    """The op of each call by its position.

    In order by family and operands; between two pairs by family alone; the rest by family and
    operands in any order.
    """
    have, wanted = [key for _, key in called], [key for _, key in ops]
    pairs = keys.common(have, wanted)
    # Keys without operands pair in order only.
    swapped = [(a, b) for a, b in keys.in_any_order(pairs, have, wanted) if have[a][1]]
    taken = {b for _, b in swapped}
    placed = {a for a, _ in swapped}
    more = [
        (a, b)
        for a, b in keys.between(pairs, [key[0] for key in have], [key[0] for key in wanted])
        if a not in placed and b not in taken
    ]
    return {called[a][0]: ops[b][0] for a, b in (*pairs, *swapped, *more)}


# -- ops of the compiler and of our graph ----------------------------------------------------------
# Both are the same program, captured twice: the sequences are matched in order by name and module,
# then by name alone between two pairs, then out of order inside of a module.  A compiler gets some
# ops in parts that stay one op in our graph (RMS norm, recurrent networks): between two pairs the
# parts belong to the op of the same module that has no partner.

_TURNS = (
    ("forward", False, False),
    ("backward", True, True),
    ("recompute", True, False),
    ("forward", True, False),
)
"""(part of our graph, whether to search graphs with a backward, whether among backward ops)."""


def matched(graphs: Sequence[CompiledGraph], graph: OpGraph) -> list[dict[int, int]]:
    """For each compiled graph: our op by the position of theirs.

    Forward ops in a backward graph are searched among recomputed ops of checkpoints, then among
    those that no forward graph has.
    """
    result: list[dict[int, int]] = [{} for _ in graphs]
    taken: set[int] = set()
    for part, in_backward, backward in _TURNS:
        theirs = [
            (number, place)
            for number, compiled in enumerate(graphs)
            if compiled.backward == in_backward
            for place, op in enumerate(compiled.ops)
            if op.backward == backward and place not in result[number] and not keys.on_host(op.name)
        ]
        ours = [
            op for op in graph.ops if op.part == part and op.id not in taken and is_launched(op)
        ]
        program = [graphs[number].ops[place] for number, place in theirs]
        for i, op in _pairs(program, ours):
            number, place = theirs[i]
            result[number][place] = op.id
            taken.add(op.id)
    return result


def is_launched(op: Op) -> bool:
    """Whether an op of our graph launches a kernel."""
    rule = find_rule(op.target)
    return op.kind == "kernel" and (rule is None or rule.fusion != "free")


def _pairs(theirs: Sequence[ProgramOp], ours: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """(position of theirs, our op); several of theirs may be one of ours."""
    names = [keys.common_name(op.name) for op in theirs]
    own_names = [keys.common_name(op.name.replace(".", "::", 1)) for op in ours]
    have: list[keys.Key] = [
        (f"{n} in {op.module}", ()) for n, op in zip(names, theirs, strict=True)
    ]
    wanted: list[keys.Key] = [
        (f"{n} in {op.module}", ()) for n, op in zip(own_names, ours, strict=True)
    ]
    exact = keys.common(have, wanted)
    pairs = sorted((*exact, *keys.between(exact, names, own_names)))
    # Ops of one name in a module swap, as the two products in the backward of a linear layer.
    swapped = keys.in_any_order(pairs, have, wanted)
    yield from ((a, ours[b]) for a, b in (*pairs, *swapped))
    placed, taken = {a for a, _ in swapped}, {b for _, b in swapped}
    for parts, others in keys.gaps(pairs, len(theirs), len(ours)):
        left = [ours[number] for number in others if number not in taken]
        for part in parts:
            composite = next((op for op in left if _is_inside(theirs[part], op)), None)
            if composite is not None and part not in placed:
                yield part, composite


def _is_inside(part: ProgramOp, op: Op) -> bool:
    """Whether a part may belong to this op: both run in the same module."""
    return part.module == op.module or part.module.startswith(f"{op.module}.")


# -- dataflow --------------------------------------------------------------------------------------

_FEW = 16
"""Readers of one tensor are kin up to this number."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The ops of a graph that launch kernels, in order, with their neighbours."""

    ops: tuple[int, ...]  # ids
    makers: Mapping[int, frozenset[int]]  # of the inputs of an op
    readers: Mapping[int, frozenset[int]]  # of its outputs
    kin: Mapping[int, frozenset[int]]  # other readers of its inputs

    @staticmethod
    def of(graph: OpGraph) -> Dataflow:
        """The flow of tensors, by the last writer of their storage."""
        writer: dict[int, int] = {}
        version: dict[int, int] = {}  # of a storage: by the op that wrote it last
        makers: dict[int, set[int]] = {}
        readers: dict[int, set[int]] = defaultdict(set)
        shared: dict[tuple[int, int], list[int]] = defaultdict(list)
        launched = tuple(op.id for op in graph.ops if is_launched(op))
        for number in launched:
            op = graph.ops[number]
            makers[number] = set()
            for storage in {graph.values[value].storage for value in op.inputs}:
                shared[storage, version.get(storage, -1)].append(number)
                if storage in writer:
                    makers[number].add(writer[storage])
                    readers[writer[storage]].add(number)
            for value in op.outputs:
                writer[graph.values[value].storage] = number
                version[graph.values[value].storage] = number
        kin: dict[int, set[int]] = defaultdict(set)
        for together in shared.values():
            if len(together) <= _FEW:
                for number in together:
                    kin[number].update(together)
        return Dataflow(
            launched,
            {op: frozenset(makers[op]) for op in launched},
            {op: frozenset(readers[op]) for op in launched},
            {op: frozenset(kin[op] - {op}) for op in launched},
        )


@dataclass(slots=True)
class Windows:
    """The first and the last kernel of a step in which each op can run, after its makers and before
    its readers."""

    first: dict[int, int]
    last: dict[int, int]

    @staticmethod
    def of(
        flow: Dataflow,
        home: Mapping[int, int],
        library: Sequence[bool],
        limits: Mapping[int, tuple[int, int]],
    ) -> Windows:
        """Windows by the known kernels of ops.

        home: known kernels by op.  library: whether each kernel of the step is a call into a
        library, which computes one op.  limits: windows of ops without their neighbours.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for op in flow.ops:
            if op in home:
                first[op] = home[op] + library[home[op]]
                continue
            first[op] = max((limits[op][0], *(first[maker] for maker in flow.makers[op])))
        for op in reversed(flow.ops):
            if op in home:
                last[op] = home[op] - library[home[op]]
                continue
            last[op] = min((limits[op][1], *(last[reader] for reader in flow.readers[op])))
        return Windows(first, last)

    def around(self, op: int) -> tuple[int, int]:
        """The window of an op; if its ends contradict each other, all between them."""
        ends = self.first[op], self.last[op]
        return min(ends), max(ends)
