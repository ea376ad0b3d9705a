"""Equal iterations that stand once cost what they cost written out.  `expand` is the oracle."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from msgspec.structs import replace

import rooftrace as rt
from rooftrace.costmodels.estimates.estimates import Estimate, estimate
from rooftrace.costmodels.estimates.moduletree import islands
from rooftrace.costmodels.fusion.executions import PRESETS, ExecutionModel
from rooftrace.costmodels.fusion.plans import Launch, plan
from rooftrace.costmodels.memory.footprint import KINDS, memory
from rooftrace.costmodels.rewrites.editing import without_dead_ops
from rooftrace.costmodels.timing.queue import HostSeconds, schedule
from rooftrace.diffs.costs.differences import diff_estimates
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Ref, Repeat, pattern_of
from rooftrace.tracer.lowering.stacks import roll_stacks
from tests.conftest import in_turn
from tests.costmodels.conftest import DEEPSEEK, TEXT, language_model
from tests.costmodels.graph_support import Builder
from tests.costmodels.memory_models import built, loss_of
from tests.costmodels.repeat_support import kernels, nests, stacks, totals

UNFUSED = ("naive", "eager", "seed-naive", "seed-efficient")
FUSED = ("compiled", "efficient")


def assert_same(short: OpGraph, flat: OpGraph, execution: str | ExecutionModel) -> None:
    """Every number of a short graph is that of the flat one."""
    plans = plan(short, execution), plan(flat, execution)
    one, other = map(estimate, plans)
    assert totals(plans[0]) == totals(plans[1])
    assert kernels(plans[0]) == kernels(plans[1])
    assert one.kernels == other.kernels
    assert one.t_est == pytest.approx(other.t_est, rel=1e-9)
    assert one.times.t_serial == pytest.approx(other.times.t_serial, rel=1e-9)
    assert_same_breakdowns(one, other)


def assert_same_breakdowns(one: Estimate, other: Estimate) -> None:
    for breakdown in ("by_module", "by_operator", "by_pattern"):
        entries, others = (getattr(e, breakdown)() for e in (one, other))
        assert entries.keys() == others.keys()
        for key, entry in entries.items():
            for name, amount in entry.items():
                same = (
                    pytest.approx(others[key][name], rel=1e-9, abs=1e-18)
                    if isinstance(amount, float)
                    else others[key][name]
                )
                if name != "regime":  # of two equal ones, rounding may choose
                    assert amount == same, (breakdown, key, name)
    assert one.assumption_seconds == pytest.approx(other.assumption_seconds, rel=1e-9)


def assert_same_memory(short: OpGraph, flat: OpGraph) -> None:
    found, expected = memory(short), memory(flat)
    numbers, others = found.to_dict(), expected.to_dict()
    assert {**numbers, "where": 0} == {**others, "where": 0}
    assert found.tensors == expected.tensors  # not only the largest
    assert found.by_module() == expected.by_module()
    at = {moment.time: moment.sizes for moment in expected.timeline.moments}
    for moment in found.timeline.moments:
        assert moment.sizes == at[moment.time], (moment, KINDS)


# -- made up ---------------------------------------------------------------------------------------


def read_in_the_last_iteration(count: int, inner: int = 0) -> OpGraph:
    """Forward makes a tensor in every iteration, and backward reads the one that was made last."""
    b = Builder()
    x, y = b.input(6, 8), b.value((6, 8))
    inside = (0, 1) if inner else (0,)
    made = b.value((6, 8))
    b.values[made] = replace(b.values[made], repeats=inside)
    b.op("aten.exp", {"self": Ref(x)}, (made,), part="forward", repeats=inside)
    # All of them are alive here, at the peak.
    both = b.value((6, 8))
    b.op("aten.cat", {"tensors": (Ref(made, every=True),), "dim": 0}, (both,), part="forward")
    b.op("aten.exp", {"self": Ref(made)}, (y,), part="backward")
    repeats = (Repeat(0, count), Repeat(1, inner)) if inner else (Repeat(0, count),)
    return b.graph(y, repeats=repeats)


@pytest.mark.parametrize(("count", "inner"), [(2, 0), (20, 0), (3, 9), (20, 20)])
def test_backward_saves_what_it_reads_of_a_repeat_and_no_other_iteration(
    count: int, inner: int
) -> None:
    graph = read_in_the_last_iteration(count, inner)
    found = memory(graph)
    assert found.saved == 6 * 8 * 2  # the last one, in bf16
    assert found.peak >= count * max(1, inner) * found.saved
    assert_same_memory(graph, graph.expand().verify())
    assert found.to_frame()["saved"].sum() == 1


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(nests())
@example(read_in_the_last_iteration(2))
@example(read_in_the_last_iteration(9, 2))
@example(read_in_the_last_iteration(8, 7))
def test_random_nests(graph: OpGraph) -> None:
    flat = graph.expand().verify()
    assert_same_memory(graph, flat)
    for execution in ("naive", "eager", ExecutionModel(dispatch="compiled")):
        assert_same(graph, flat, execution)
    # Launched as one graph, an iteration begins as the one before it ends: here there may be none.
    assert totals(plan(graph, "seed-efficient")) == totals(plan(flat, "seed-efficient"))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(stacks())
def test_random_stacks(graph: OpGraph) -> None:
    short = roll_stacks(graph)
    assert_same_memory(short, graph)
    for execution in UNFUSED:
        assert_same(short, graph, execution)
    fused, flat = plan(short, "efficient"), plan(graph, "efficient")
    # A chain that goes on through all iterations is cut between them.
    assert fused.total.work == flat.total.work
    assert fused.bytes.total >= flat.bytes.total
    assert fused.coverage == flat.coverage and fused.compulsory == flat.compulsory


# -- memory ----------------------------------------------------------------------------------------


def drifting(x: torch.Tensor) -> torch.Tensor:
    """A scan in which neighbouring ops of backward have one name."""
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(1, x.shape[1]):
        state = torch.tanh(state * 0.5) + x[:, t] - x[:, t - 1]
        out.append(state)
    return torch.stack(out, 1)


class Drifting(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(width, width), torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(drifting(self.first(x)))
        return out


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_a_loop_has_the_peak_of_all_its_turns(phase: str) -> None:
    x = torch.empty(8, 60, 64)
    short = rt.trace(Drifting(64), x, phase=phase)
    flat = rt.trace(Drifting(64), x, phase=phase, repeats=False)
    assert short.repeats and not flat.repeats
    assert_same_memory(short, short.expand())
    assert memory(short).peak == memory(flat).peak


@pytest.mark.parametrize("name", ["llama", pytest.param("mamba", marks=pytest.mark.slow)])
def test_a_training_step_has_the_peak_of_all_its_layers(name: str) -> None:
    model, inputs = built(name, "training")
    short, flat = (
        rt.trace(model, **inputs, phase="training", loss=loss_of, repeats=repeats)
        for repeats in (True, False)
    )
    assert short.repeats and not flat.repeats
    assert_same_memory(short, short.expand())
    assert memory(short).peak == memory(flat).peak


@settings(max_examples=60, deadline=None)
@given(nests())
def test_the_timeline_of_a_short_graph_is_on_that_of_the_flat_one(graph: OpGraph) -> None:
    flat = {m.time: sum(m.sizes) for m in memory(graph.expand()).timeline.moments}
    short = [(m.time, m.total) for m in memory(graph).timeline.moments]
    assert all(flat[time] == total for time, total in short)
    assert [time for time, _ in short] == sorted({time for time, _ in short})
    assert short[0][0] == 0 and short[-1][0] == max(flat)


# -- what only a variable holds -----------------------------------------------------------------


class Held(torch.nn.Module):
    """Layers whose caller keeps tensors in variables that nobody reads any more."""

    def __init__(self, keep: Callable[[list[Any], torch.Tensor], Any], inner: Any, count: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(inner() for _ in range(count))
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = []
        for layer in self.layers:
            one = self.keep(kept, x)
            x = layer(x)
            del one
        return x.relu()


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


def last(count: int) -> Callable[[list[Any], torch.Tensor], Any]:
    """Keeps what went into the last `count` layers."""

    def keep(kept: list[Any], x: torch.Tensor) -> None:
        kept[:] = deque([*kept, x], count)

    return keep


class Caller(torch.nn.Module):
    """Variables of a layer live through a call of a layer inside, the recorded one's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = torch.nn.Linear(16, 16), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        big = torch.cat([y] * 6).exp()
        small = torch.relu(y)
        x = self.inner(y)
        del big, small
        return x


KEPT: dict[str, Callable[[], torch.nn.Module]] = {
    "one": lambda: Held(last(1), Inner, 10),
    "two": lambda: Held(last(2), Inner, 10),
    "three": lambda: Held(last(3), Inner, 10),
    "all": lambda: Held(lambda kept, x: kept.append(x.exp()), Inner, 8),
    "views": lambda: Held(lambda kept, x: kept.append(x.exp()[:2]), Inner, 8),
    "large": lambda: Held(lambda kept, x: torch.cat([x] * 6).exp(), Inner, 8),
    "two in two": lambda: Held(last(2), lambda: Held(last(2), Inner, 5), 5),
    "large in large": lambda: Held(
        lambda kept, x: torch.cat([x] * 6).exp(),
        lambda: Held(lambda kept, x: torch.cat([x] * 8).exp(), Inner, 2),
        6,
    ),
    "caller": lambda: Held(last(1), Caller, 7),
    "caller in two": lambda: Held(last(2), lambda: Held(last(1), Caller, 2), 5),
}


@pytest.mark.parametrize(("kept", "phase"), in_turn(KEPT, ["training", "forward"]))
def test_what_only_a_variable_holds_is_held_in_the_short_graph(kept: str, phase: str) -> None:
    module = KEPT[kept]().train(phase == "training")
    short, flat = (
        rt.trace(module, torch.randn(8, 16), phase=phase, repeats=repeats)
        for repeats in (True, False)
    )
    assert_same_memory(short, short.expand())
    assert_same_memory(short, flat)


# -- the queue -------------------------------------------------------------------------------------

SECONDS = st.sampled_from((0.0, 0.5, 1.0, 2.0, 7.0))
LAUNCHES = st.recursive(
    st.tuples(st.integers(0, 3), st.none() | SECONDS, st.booleans()),
    lambda inner: st.tuples(st.integers(2, 9), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(LAUNCHES, min_size=1, max_size=4), SECONDS)
def test_many_turns_of_the_queue_are_gone_through_at_once(parts: list, dispatch: float) -> None:
    counts: list[int] = []
    short: list[tuple[Launch, float | None]] = []
    flat: list[tuple[Launch, float | None]] = []
    first: list[int] = []  # where the first of each short launch is among the flat ones

    def write(parts: list, repeats: tuple[int, ...], is_first: bool) -> None:
        for part in parts:
            if len(part) == 2:
                turns, inner = part
                number = len(counts)
                if is_first:
                    counts.append(turns)
                for turn in range(turns):
                    write(inner, (*repeats, number), is_first and turn == 0)
                continue
            dispatches, seconds, sync = part
            if is_first:
                first.append(len(flat))
                launch = Launch(dispatches, seconds is not None, sync, repeats)
                short.append((launch, seconds))
            flat.append((Launch(dispatches, seconds is not None, sync), seconds))

    write(parts, (), True)

    def run(launches: list[tuple[Launch, float | None]]) -> tuple[list[float], float]:
        seconds = [s for _, s in launches if s is not None]
        return schedule(seconds, [launch for launch, _ in launches], HostSeconds(dispatch), counts)

    starts, end = run(short)
    all_starts, expected = run(flat)
    started = iter(all_starts)
    by_launch = [next(started) if launch.on_device else None for launch, _ in flat]
    assert end == pytest.approx(expected, rel=1e-12)
    assert starts == [by_launch[i] for i in first if by_launch[i] is not None]


def test_a_long_loop_in_many_layers_takes_no_time_to_schedule() -> None:
    # Enqueued every second; 64 x 4096 kernels of 2 s each keep the device busy from 1 s on.
    launches = [Launch(1, True, repeats=(0, 1)), Launch(1, True)]
    _, end = schedule([2.0, 3.0], launches, HostSeconds(1.0), (64, 4096))
    assert end == 1 + 64 * 4096 * 2 + 3


# -- traced ----------------------------------------------------------------------------------------

LAYERS = 6


@pytest.fixture(scope="module")
def stack() -> Callable[[str, str], OpGraph]:
    """`stack("Llama", "training")`: its layers written out; each is traced once per phase."""
    known: dict[tuple[str, str], OpGraph] = {}
    tokens = torch.randint(0, 96, (2, 40))
    text = {**TEXT, "num_hidden_layers": LAYERS, "num_key_value_heads": 2}
    settings = {
        "GPT2": dict(vocab_size=96, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=4,
                     bos_token_id=0, eos_token_id=0),
        "Llama": text,
        "Mixtral": {**text, "num_local_experts": 4},
        "DeepseekV3": {**DEEPSEEK, "num_hidden_layers": LAYERS + 1},  # one is dense
    }  # fmt: skip

    def graph(family: str, phase: str) -> OpGraph:
        if (family, phase) not in known:
            model = language_model(family, **settings[family])
            options = {"use_cache": False} if phase == "training" else {}
            found = rt.trace(model, input_ids=tokens, phase=phase, **options)
            known[family, phase] = found.expand()
        return known[family, phase]

    return graph


@pytest.mark.parametrize(
    ("family", "phase"),
    in_turn(
        ["GPT2", "Llama", "Mixtral", "DeepseekV3"], ["training", "forward", "prefill", "decode"]
    ),
)
def test_stacks_of_layers(stack: Callable[[str, str], OpGraph], family: str, phase: str) -> None:
    flat = stack(family, phase)
    short = roll_stacks(flat)
    assert short.repeats and len(short.ops) < len(flat.ops)
    assert_same_memory(short, flat)
    for execution in PRESETS:
        assert_same(short, flat, execution)


def test_groups_of_layers_are_translates(stack: Callable[[str, str], OpGraph]) -> None:
    """What joins two layers in the short graph joins every two, and nothing else does."""
    flat = stack("Llama", "forward")
    short = roll_stacks(flat)
    (repeat,) = short.repeats

    def joins(graph: OpGraph) -> Counter[tuple[str, ...]]:
        found: Counter[tuple[str, ...]] = Counter()
        for group in plan(graph, "efficient").groups:
            ops = [graph.ops[i] for i in group.ops]
            found[tuple(f"{pattern_of(o.module)} {o.target}" for o in ops)] += group.times
        return found

    assert joins(short) == joins(flat)
    groups = plan(short, "efficient").groups
    crossing = [g for g in groups if len({short.ops[i].repeats for i in g.ops}) > 1]
    assert [g.times for g in crossing] == [1, repeat.count]


def test_reprice_islands_and_notes_count_every_layer(stack: Callable[[str, str], OpGraph]) -> None:
    flat = stack("Llama", "decode")
    short = roll_stacks(flat)
    for change in (
        lambda g: rt.tools.reprice(g, "fp8"),
        lambda g: rt.tools.reprice(g, weights_dtype="int4", kv_dtype="fp8"),
    ):
        one, other = change(short), change(flat)
        assert one.model == other.model and one.workload == other.workload
        assert islands(one) == islands(other)
        assert_same(one, other, "efficient")
    assert f"{LAYERS} attention calls run" in plan(short, "naive").notes[0]
    assert f"{2 * LAYERS} cache appends write" in plan(short, "efficient").notes[0]


def test_a_short_graph_is_no_change(stack: Callable[[str, str], OpGraph]) -> None:
    for family, phase in (("Mixtral", "decode"), ("GPT2", "training")):
        flat = stack(family, phase)
        one, other = estimate(roll_stacks(flat)), estimate(flat)
        for a, b in ((one, other), (other, one)):
            (found,) = diff_estimates({phase: a}, {phase: b}).phases
            assert not found.modules
            for name, change in found.totals.items():
                assert change.after == pytest.approx(change.before, rel=1e-9), name


def test_a_frame_has_a_row_for_equal_kernels(stack: Callable[[str, str], OpGraph]) -> None:
    flat = stack("Llama", "forward")
    frame, full = estimate(roll_stacks(flat)).to_frame(), estimate(flat).to_frame()
    assert len(frame) < len(full) == full["count"].sum() == frame["count"].sum()
    for column in ("flops", "bytes", "bytes_weights", "t_device"):
        assert frame[column].sum() == pytest.approx(full[column].sum(), rel=1e-9)
    many = frame[frame["count"] > 1]
    assert {*many["module"], *many["module_last"]} <= set(full["module"])
    assert (full["module"] == full["module_last"]).all()
    assert (many["module"] != many["module_last"]).all()


def test_a_chain_through_all_layers_is_cut_between_them() -> None:
    # Written out it would be one kernel, of as many layers as fit: how many those are would depend
    # on where counting starts.
    b = Builder()
    x = b.input(64, 64)
    for layer in range(LAYERS):
        x = b.unary("exp", b.unary("relu", x, module=f"layers.{layer}"), module=f"layers.{layer}")
    flat = b.graph(x)
    short = roll_stacks(flat)
    (repeat,) = short.repeats
    fused = plan(short, "efficient")
    # One for the layers before, one for each of the equal ones, one for those after.
    assert [group.times for group in fused.groups] == [1, repeat.count, 1]
    assert estimate(fused).kernels == repeat.count + 2 and estimate(flat).kernels == 1
    assert fused.total.work == plan(flat, "efficient").total.work
    assert fused.bytes.total == (repeat.count + 2) * 2 * (64 * 64 * 2)  # read + write


def test_what_an_iteration_writes_for_nobody_disappears_and_what_the_next_one_reads_stays() -> None:
    b = Builder()
    x = b.input(64, 64)
    state = b.unary("sin", x)
    for layer in range(LAYERS):
        module = f"layers.{layer}"
        own = b.unary("exp", b.binary("mul", x, state, module=module), module=module)
        x = b.unary("cos", own, module=module)
        b.in_place("relu_", own, module=module)  # after its last use
        b.in_place("relu_", state, module=module)  # the next layer's
    flat = b.graph(x)
    short = roll_stacks(flat)
    assert short.repeats and len(short.ops) < len(flat.ops)
    # In each layer its own, and what the last one leaves for no layer.
    assert without_dead_ops(short)[1] == without_dead_ops(flat)[1] == LAYERS + 1


@pytest.mark.parametrize("execution", ["naive", "efficient"])
def test_a_diff_of_short_graphs_is_that_of_flat_ones(
    stack: Callable[[str, str], OpGraph], execution: str
) -> None:
    def changes(before: OpGraph, after: OpGraph) -> set[str]:
        sides = ({"decode": estimate(g, execution=execution)} for g in (before, after))
        (found,) = diff_estimates(*sides).phases
        return {
            f"{m.path} x{m.count} {m.status} {m.flops} {m.bytes} {m.ops_added} {m.ops_removed} "
            f"{m.resized}"
            for m in found.modules
        }

    before, after = stack("Llama", "decode"), stack("Mixtral", "decode")
    assert changes(roll_stacks(before), roll_stacks(after)) == changes(before, after) != set()
