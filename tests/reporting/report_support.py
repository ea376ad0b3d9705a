"""Reports made by hand, of a mixture of experts and of a net of 300 parameters, without torch.

Kernels are given as (name, module, family, part, count, matmul FLOP, vector FLOP, bytes by role).
"""

from collections.abc import Mapping, Sequence
from functools import cache

from rooftrace.costmodels.estimates.estimates import estimate
from rooftrace.costmodels.fusion import Coverage, Launch, Plan, Unsupported
from rooftrace.costmodels.fusion.executions import PRESETS
from rooftrace.costmodels.fusion.partition import FusionGroup
from rooftrace.costmodels.memory.footprint import Memory
from rooftrace.costmodels.ops.cost import Access, Cost, Work
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import ROLES, Assumption, Op, Tensor
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile import load_chip
from rooftrace.reporting.commands.reportfolder import Report
from rooftrace.studies.advice.whatifs import Guidance

Kernel = tuple[str, str, str, str, int, int, int, Mapping[str, int]]

ROPE = Unsupported(
    target="mylib.rope.default",
    count=24,
    bytes=10**6,
    shapes="bf16[8, 2048, 16, 64]",
    modules=("model.layers.*.self_attn",),
)
ASSUMPTIONS = (
    Assumption(0, "balanced-routing", "model.layers.3.mlp", "Tokens go to all experts evenly.", 8),
    Assumption(1, "balanced-routing", "model.layers.4.mlp", "Tokens go to all experts evenly.", 8),
    Assumption(2, "loss", "", "A unit gradient goes into each floating output."),
)


def made_plan(
    phase: str,
    kernels: Sequence[Kernel],
    execution: str = "efficient",
    precision: str = "fp8",
    *,
    floor: float = 0.9,
    model: Mapping[str, object] | None = None,
    workload: Mapping[str, object] | None = None,
    unsupported: Sequence[Unsupported] = (),
    assumptions: Sequence[Assumption] = (),
) -> Plan:
    """A plan of these kernels, each a group of its own; `floor` is the compulsory share."""
    values = tuple(Tensor((1,), "bf16", (1,), role, i, role) for i, role in enumerate(ROLES))
    ops: list[Op] = []
    costs: list[Cost] = []
    for name, module, family, part, count, matmul, vector, moved in kernels:
        work = {}
        if matmul:
            work[Work("matmul", precision, 2040)] = matmul
        if vector:
            work[Work("vector", "fp32")] = vector
        traffic = {Access(ROLES.index(role), False): size for role, size in moved.items() if size}
        for i in range(count):
            path = module.replace("*", str(i))
            op = Op(len(ops), f"aten.{name}.default", {}, (), (), path, part=part, family=family)
            ops.append(op)
            costs.append(Cost(work, traffic))
    graph = OpGraph(
        phase,
        values,
        tuple(ops),
        (),
        (),
        assumptions=tuple(assumptions),
        model=dict(model or {}),
        workload=dict(workload or {}),
    )
    chosen = PRESETS[execution]
    dispatches = {"eager": 8, "compiled": 1, "graph": 0}[chosen.dispatch]
    total = sum(cost.bytes() for cost in costs)
    coverage = Coverage(
        ops=len(ops),
        ops_with_rule=len(ops) - sum(entry.count for entry in unsupported),
        bytes=total,
        bytes_with_rule=total - sum(entry.bytes for entry in unsupported),
        unsupported=tuple(unsupported),
    )
    groups = tuple(
        FusionGroup(ops=(op.id,), pattern="op", name=op.name.removeprefix("aten.")) for op in ops
    )
    launches = tuple(Launch(dispatches, True) for _ in ops)
    planned = Plan(
        source=graph,
        graph=graph,
        execution=chosen,
        op_costs=tuple(costs),
        groups=groups,
        costs=tuple(costs),
        launches=launches,
        coverage=coverage,
    )
    vars(planned)["compulsory"] = int(total * floor)
    return planned


def experts(phase: str, execution: str) -> list[Kernel]:
    """61 layers of latent attention and 256 experts; 8 sequences of 255 tokens or of one."""
    hidden, layers = 7168, 61
    tokens = 8 if phase == "decode" else 2040
    touched = 57 if phase == "decode" else 256
    naive = execution == "naive"
    scores = 8 * 128 * 255 * (tokens // 8) * 12 if naive else 0
    attention, moe = "model.layers.*.self_attn", "model.layers.*.mlp"
    kernels: list[Kernel] = [
        ("embedding", "model.embed_tokens", "embedding", "forward", 1, 0, 0, stream(tokens, 2, 1)),
    ]
    passes = [("forward", 1), ("backward", 2)] if phase == "training" else [("forward", 1)]
    for part, times in passes:
        fat = times * (2 if naive else 1)
        expert, head = 3 * hidden * 2048, hidden * 129280
        core = {**stream(tokens, fat * 4, 0), "temporary": scores}
        if phase != "training":
            core["kv"] = 8 * 255 * 576
        kernels += [
            product(f"{attention}.q_b_proj", "attention", part, layers, times, tokens, 64_512_000),
            product(f"{attention}.o_proj", "attention", part, layers, times, tokens, 117_440_512),
            ("sdpa", attention, "attention", part, layers, times * 2 * tokens * 255 * 128 * 320,
             tokens * 255 * 640, core),
            ("rms_norm", "model.layers.*.input_layernorm", "norm", part, 2 * layers, 0,
             4 * tokens * hidden, stream(tokens, 4 * fat, 0)),
            ("grouped_mm", f"{moe}.experts", "moe", part, 58, times * 2 * tokens * 8 * expert, 0,
             {**stream(tokens, 20, touched * expert), "gradients": (times - 1) * touched * expert}),
            ("topk", f"{moe}.gate", "moe", part, 58, 0, tokens * 256, {"activations": 8 * tokens}),
            product("lm_head", "dense", part, 1, times, tokens, head),
        ]  # fmt: skip
    if phase == "training":
        states = {"optimizer": 16 * 10**12, "weights": 13 * 10**11, "gradients": 13 * 10**11}
        kernels.append(("adamw", "", "optimizer", "optimizer", 1, 0, 8 * 10**12, states))
    return kernels


def product(
    module: str, family: str, part: str, count: int, times: int, tokens: int, weights: int
) -> Kernel:
    """A matrix product of `tokens` rows with `weights` elements of one byte."""
    return (
        "mm",
        module,
        family,
        part,
        count,
        times * 2 * tokens * weights,
        0,
        stream(tokens, 6, weights),
    )


def stream(tokens: int, times: int, weights: int) -> dict[str, int]:
    """Bytes of hidden states moved `times` times, and of weights read once."""
    return {"activations": tokens * 7168 * times, "weights": weights}


TINY: list[Kernel] = [
    ("mm", "fc", "dense", "forward", 2, 4096, 0, {"weights": 1024, "activations": 1024}),
    ("relu", "act", "activation", "forward", 1, 0, 128, {"activations": 1024}),
]


@cache
def made_report(
    kind: str = "experts",
    phases: Sequence[str] = ("training", "prefill", "decode"),
    executions: Sequence[str] = ("naive", "efficient"),
    chips: Sequence[str | Chip] = ("h200-sxm",),
    **plan_changes: object,
) -> Report:
    """A report of `experts` or of the `tiny` net, made once; nobody changes it."""
    model: dict[str, object] = {"name": "TinyNet", "params": 300, "params_trainable": 300}
    if kind == "experts":
        model = {"name": "DeepSeek-V3", "params": 671026404352, "params_trainable": 671026404352}
    estimates: dict[str, dict[str, dict[str, object]]] = {}
    memory, graphs = {}, {}
    for phase in phases:
        tokens = 8 if phase == "decode" else 2040
        workload: dict[str, object] = {"batch": 8, "item": "sample", "items": 8, "dtype": "fp32"}
        if kind == "experts":
            workload = {
                "batch": 8,
                "seq": 255,
                "kv": 255,
                "item": "token",
                "items": tokens,
                "dtype": "fp8",
                "optimizer": "adamw" if phase == "training" else None,
            }
        estimates[phase] = {}
        for execution in executions:
            kernels = experts(phase, execution) if kind == "experts" else TINY
            precision = "fp8" if kind == "experts" else "fp32"
            changes: dict[str, object] = {"assumptions": ASSUMPTIONS, **plan_changes}
            plan = made_plan(phase, kernels, execution, precision, model=model, workload=workload,
                             **changes)  # type: ignore[arg-type]  # fmt: skip
            placed = [estimate(plan, load_chip(chip)) for chip in chips]
            estimates[phase][execution] = {one.chip.name: one for one in placed}
            graphs[phase] = plan.graph
        memory[phase] = (
            made_memory(phase) if kind == "experts" else sized_memory(1200, 0, 0, 0, 2048)
        )
    report = Report(estimates, memory, graphs)  # type: ignore[arg-type]
    # Ops made by hand have no arguments, so that nothing but these plans can be priced.
    vars(report)["guidance"] = {phase: Guidance(report.estimate(phase), ()) for phase in phases}
    return report


def made_memory(phase: str) -> Memory:
    """671 GB of weights, and in training two bytes of gradient and twelve of state for each."""
    weights = 671_026_404_352
    if phase == "training":
        return sized_memory(weights, 0, 2 * weights, 12 * weights, 33 * 10**9)
    return sized_memory(weights, 143_000_000, 0, 0, 650_000_000)


def sized_memory(weights: int, kv: int, gradients: int, optimizer: int, activations: int) -> Memory:
    """A Memory whose peak is the sum of its parts."""
    return Memory(
        weights=weights,
        kv=kv,
        gradients=gradients,
        optimizer=optimizer,
        activations_peak=activations,
        peak=weights + kv + gradients + optimizer + activations,
        at_peak={
            **dict.fromkeys(ROLES, 0),
            "weights": weights,
            "kv": kv,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
        },
        where=0,
    )
