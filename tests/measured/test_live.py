"""A loop that is watched: its FLOPs are torch's, its times the clock's, and it does not notice."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.hardware import load_chip
from rooftrace.measured.live import LiveSession, profiles, session
from rooftrace.reporting.views.results import as_markdown
from tests.measured.live_support import Net, Ticks, batch, made, matrix_flops

CHIP = "l4"
QUICK: dict[str, Any] = {"chip": CHIP, "warmup": 0, "profile": 0}


def flops_of(step: Callable[[], object]) -> int:
    """FLOP of a real step by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def watched(live: LiveSession, step: Callable[[], object], times: int = 2) -> LiveSession:
    for _ in range(times):
        with live.step():
            step()
    return live


# -- what is counted -------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: torch.optim.Optimizer, pieces: int = 1) -> None:
    for _ in range(pieces):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_flops_of_training_are_those_of_the_real_step(kind: Any, pieces: int) -> None:
    model = made()
    optimizer = kind(model.parameters(), lr=0.1)
    live = watched(rt.live(model, **QUICK), lambda: train(model, optimizer, pieces))
    assert matrix_flops(live) == flops_of(lambda: train(model, optimizer, pieces)) > 0
    assert [(graph.phase, count) for graph, count in live.graphs] == [
        ("training", pieces),
        ("forward", 1),  # the optimizer
    ]


def test_flops_of_inference_have_no_backward() -> None:
    model = made().eval()

    def forward() -> None:
        with torch.no_grad():
            model(batch()[0])

    live = watched(rt.live(model, **QUICK), forward)
    assert matrix_flops(live) == flops_of(forward) == 2 * 8 * (16 * 32 + 32 * 4)


def test_inference_mode_is_counted_and_the_batch_is_not_kept() -> None:
    import weakref

    model = made().eval()
    kept: list[weakref.ref[Tensor]] = []

    def forward() -> None:
        with torch.inference_mode():
            x = torch.randn(64, 16)
            kept.append(weakref.ref(x))
            model(x)

    live = watched(rt.live(model, **QUICK), forward)
    assert [reference() for reference in kept] == [None, None]
    assert matrix_flops(live) == flops_of(forward) == 2 * 64 * (16 * 32 + 32 * 4)


def test_a_forward_with_gradients_on_and_no_backward_is_a_forward() -> None:
    model = made()
    live = watched(rt.live(model, **QUICK), lambda: model(batch()[0]))
    assert matrix_flops(live) == 2 * 8 * (16 * 32 + 32 * 4)


def test_frozen_weights_and_outputs_without_a_gradient_cost_no_backward() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 64)
            self.body.requires_grad_(False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.body(x)
            return {"a": self.a(hidden), "b": self.b(hidden)}

    model = TwoHeads()

    def step() -> None:
        model(batch()[0])["a"].square().mean().backward()

    live = watched(rt.live(model, **QUICK), step)
    assert matrix_flops(live) == flops_of(step)


def test_two_modules_that_work_on_each_other_are_both_counted() -> None:
    maker, judge = nn.Linear(16, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (maker, judge)]

    def step() -> None:
        judge(maker(batch()[0])).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    live = watched(rt.live(maker, judge, **QUICK), step)
    assert matrix_flops(live) == flops_of(step)


def test_recomputed_work_is_in_hfu_and_not_in_mfu() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    model = Checkpointed()

    def step() -> None:
        model(batch()[0].requires_grad_()).sum().backward()

    figures = watched(rt.live(model, **QUICK), step).figures
    assert figures.mfu is not None and figures.hfu is not None
    forward = 2 * 8 * (16 * 64 + 64 * 64)
    # torch's counter has what is recomputed: the first product, as the second's input is kept.
    assert figures.hfu / figures.mfu == pytest.approx(flops_of(step) / (3 * forward))
    assert figures.hfu > figures.mfu


def test_autocast_around_the_call_and_the_mode_of_each_part_are_those_that_ran() -> None:
    model = made()
    model.norm.eval()  # frozen statistics in a model that trains

    def step() -> None:
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()

    live = watched(rt.live(model, **QUICK), step)
    ((graph, _),) = live.graphs
    products = [op for op in graph.ops if op.target in ("aten.addmm.default", "aten.mm.default")]
    assert {graph.values[op.outputs[0]].dtype for op in products} == {"bf16"}
    assert matrix_flops(live) == flops_of(step)
    (norm,) = (op for op in graph.ops if "batch_norm" in op.target and op.part == "forward")
    assert norm.arguments["training"] is False


def test_steps_of_other_sizes_have_their_own_counts() -> None:
    model = made()
    live = rt.live(model, **QUICK, clock=Ticks(1.0))
    for size in (4, 8, 8, 16):
        with live.step():
            model(batch(size)[0]).sum().backward()
    one = 3 * 2 * 32 * 4 + 2 * 2 * 16 * 32  # FLOP of a sample in products; x asks for no gradient
    seconds = 4.0
    peak = load_chip(CHIP).peak("vector", "fp32")
    assert live.figures.mfu == pytest.approx((4 + 8 + 8 + 16) * one / seconds / peak)
    assert live.figures.samples_per_s == (4 + 8 + 8 + 16) / seconds
    assert live.figures.uncounted == 0


class Attending(nn.Module):
    """One layer of attention: its FLOP grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.mix(self.table(ids)).chunk(3, -1)
        return self.head((q @ k.transpose(1, 2)).softmax(-1) @ v)


def test_lengths_between_those_traced_are_priced_by_a_fit_that_is_torchs_count() -> None:
    model = Attending()
    sizes = [(2, n) for n in (4, 64, 10, 48, 20, 33, 40, 7)]
    batches = [torch.zeros(size, dtype=torch.long) for size in [*sizes, (2, 25), (2, 61)]]
    live = rt.live(model, **QUICK, kinds=8, clock=Ticks(1.0))
    for ids in batches:
        with live.step():
            model(ids).sum().backward()
    seconds = float(len(batches))
    counted = sum(flops_of(lambda ids=ids: model(ids).sum().backward()) for ids in batches)
    peak = load_chip(CHIP).peak("vector", "fp32")
    assert live.figures.mfu == pytest.approx(counted / seconds / peak)
    assert (live.figures.steps, live.book.fitted) == (10, 2)
    between = rt.estimate(live.book.graph_of_step(_note_of(live, 25)), chip=CHIP, execution="eager")
    live.since_last()
    with live.step():
        model(batches[-2]).sum().backward()
    assert live.since_last().expected == pytest.approx(between.t_est, rel=0.05)
    assert any("priced by a fit" in note for note in live.result.notes)


def _note_of(live: LiveSession, length: int) -> Any:
    """The step of the session with ids of this length."""
    from rooftrace.measured.live.notes import ItemCount, StepNote

    calls = [note for pattern in live._all.sums for note, _ in pattern.calls]
    (call,) = (note for note in calls if note.sizes[0][0][0][1] == length)
    return StepNote((call,), (), ItemCount())


def test_no_fit_is_made_beyond_the_sizes_that_were_traced_or_of_what_is_no_polynomial() -> None:
    from rooftrace.measured.live.graphbook import Price, fitted
    from rooftrace.measured.live.notes import CallNote

    def call(batch: int, length: int) -> CallNote:
        sizes = (((torch.Size((batch, length)), torch.int64, False),), (), ("input_ids",))
        return CallNote(module=0, sizes=sizes, training=True, gradients=True, autocast=())

    def price(batch: int, length: int, more: float = 0.0) -> Price:
        flops = 100 * batch * length + 7 * batch * length**2 + 30 + more
        return Price(flops=flops, flops_matrix=flops, expected=1e-3 + 1e-6 * batch * length)

    points = [(b, n) for b in (1, 2, 4) for n in (8, 16, 64)]
    traced = {call(*point): price(*point) for point in points}
    two = fitted(call(3, 40), traced)
    assert two is not None and two.flops == pytest.approx(price(3, 40).flops, rel=1e-9)
    assert two.expected == pytest.approx(price(3, 40).expected)
    assert fitted(call(3, 65), traced) is None
    assert fitted(call(3, 40), dict(list(traced.items())[:6])) is None  # as many as there are terms
    rough = {
        note: price(*point, more=point[1] % 3) for note, point in zip(traced, points, strict=True)
    }
    assert fitted(call(3, 40), rough) is None


def test_a_long_loop_of_many_different_steps_keeps_their_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rooftrace.measured.live import session

    sizes = (4, 8, 16, 8, 2, 4, 8)

    def figures() -> Any:
        live = rt.live(made(), **QUICK, clock=Ticks(1.0, 0.5))
        model = live._notebook.modules[0]
        for size in sizes:
            with live.step():
                model(batch(size)[0]).sum().backward()
        assert len(live.graphs) == 1
        return live.figures, live._all.patterns

    apart, kept = figures()
    monkeypatch.setattr(session, "_PATTERNS", 2)
    folded, fewer = figures()
    assert (kept, fewer <= 2) == (4, True)
    for name in ("steps", "uncounted", "seconds", "flops", "mfu", "expected", "samples_per_s"):
        assert getattr(folded, name) == pytest.approx(getattr(apart, name))
    assert folded.interval == pytest.approx(apart.interval)


def test_ops_without_a_rule_and_what_a_trace_assumes_are_said() -> None:
    class Choosing(Slow):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x * 2 if bool(x.sum() > 0) else x

    model = Choosing().eval()
    with torch.no_grad():
        # Too many numbers to carry: which way the condition goes is not known.
        live = watched(rt.live(model, **QUICK), lambda: model(torch.randn(5000, 16)))
    notes = live.result.notes
    assert any(note.startswith("no rule for rooftrace_tests.nap.default") for note in notes)
    assert any(note.startswith("assumed: ") for note in notes)


def test_an_argument_that_only_divides_the_loss_makes_no_kind_of_its_own() -> None:
    class Divided(Net):
        def forward(self, x: Tensor, num_items_in_batch: int = 1) -> Tensor:
            return super().forward(x) / num_items_in_batch

    model, counts = Divided(), iter((5, 6, 7, 8))
    live = rt.live(model, **QUICK, kinds=1)
    watched(live, lambda: model(batch()[0], num_items_in_batch=next(counts)).sum().backward(), 4)
    assert (live.figures.steps, live.figures.uncounted) == (4, 0)


def test_kinds_beyond_the_limit_are_in_no_number_and_shown() -> None:
    model = made()
    live = rt.live(model, **QUICK, kinds=1, clock=Ticks(1.0))
    for size in (4, 2, 8, 8):
        with live.step():
            model(batch(size)[0]).sum().backward()
    assert (live.figures.steps, live.figures.uncounted) == (2, 2)  # twice as many were traced
    assert live.figures.samples_per_s == (4 + 2) / 2
    assert "the work of 2 is not known" in " ".join(str(live).split())
    assert any("kinds=" in note for note in live.result.notes)


def test_tokens_are_those_that_run_padding_included() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(self.table(input_ids)) * attention_mask[..., None]

    model, ids = Words(), torch.randint(0, 10, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4])
    live = rt.live(model, **QUICK, clock=Ticks(1.0, 0.5))
    watched(live, lambda: model(attention_mask=mask, input_ids=ids).sum().backward())
    assert live.figures.tokens_per_s == 2 * 7 / 0.5
    assert live.figures.samples_per_s == 2 / 0.5
    own = rt.live(
        model, **QUICK, clock=Ticks(1.0), items=lambda **call: call["attention_mask"].sum()
    )
    watched(own, lambda: model(attention_mask=mask, input_ids=ids).sum().backward())
    assert own.figures.samples_per_s == 10


def test_the_graph_of_a_whole_step_can_be_handed_in() -> None:
    model = made()

    def step() -> None:
        x, y = batch()
        F.cross_entropy(model(x), y).backward()

    with rt.capture(model) as captured:
        step()
    live = watched(rt.live(model, **QUICK, graph=captured.graph), step)
    assert live.figures.flops == rt.estimate(captured.graph, chip=CHIP, execution="eager").flops
    with live.step():
        model(batch(2)[0])
    assert live.figures.uncounted == 1


# -- torch.compile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_module_is_counted_and_compiled_as_a_whole_and_once(inside: bool) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    model: Any = made()
    if inside:
        model.compile(backend="aot_eager", fullgraph=True)
    called = model if inside else torch.compile(model, backend="aot_eager", fullgraph=True)
    x, y = batch()
    live = rt.live(called, **QUICK)
    assert live.execution.name == "compiled"
    with torch._dynamo.config.patch(error_on_recompile=True):
        watched(live, lambda: F.cross_entropy(called(x), y).backward(), 3)
    assert matrix_flops(live) == flops_of(lambda: F.cross_entropy(made()(x), y).backward())
    torch._dynamo.reset()


def test_a_step_that_does_not_call_the_module_says_which_to_pass() -> None:
    live = watched(rt.live(made(), **QUICK), lambda: None)
    assert live.figures.mfu is None and live.figures.seconds is not None
    assert any("torch.compile(...) returned" in note for note in live.result.notes)


# -- times -----------------------------------------------------------------------------------------


def test_times_are_those_of_the_clock_without_warm_ups() -> None:
    model = made()
    # Of each step: 3 s before it, 2 s in it.
    live = rt.live(model, chip=CHIP, warmup=2, profile=0, clock=Ticks(3.0, 2.0))
    watched(live, lambda: model(batch()[0]).sum().backward(), 6)
    figures = live.figures
    assert (figures.steps, figures.seconds, figures.outside) == (4, 2.0, 3.0)
    assert live.result.median == 2.0
    assert live.result.warmups == 2
    assert figures.flops_per_s == pytest.approx((figures.flops or 0) / 2)
    estimates = [rt.estimate(g, chip=CHIP, execution="eager") for g, _ in live.graphs]
    assert figures.expected == pytest.approx(sum(e.t_est for e in estimates))
    assert figures.bytes == sum(e.bytes_hbm for e in estimates)
    assert figures.ratio == pytest.approx(2.0 / sum(e.t_est for e in estimates))


def test_figures_of_a_window_are_of_its_steps_and_reading_them_is_in_no_time() -> None:
    model, clock = made(), Ticks(1.0)
    live = rt.live(model, **QUICK, clock=clock)
    watched(live, lambda: model(batch()[0]).sum(), 2)
    clock.gaps = (5.0,)
    assert live.since_last().seconds == 1.0
    watched(live, lambda: model(batch()[0]).sum(), 2)
    window = live.since_last()
    assert (window.steps, window.seconds, window.outside) == (2, 5.0, 5.0)
    assert live.figures.seconds == 3.0
    assert live.figures.outside == (1.0 + 5.0) / 2  # not the 5 s in which the first window was read


def test_a_step_that_fails_is_not_counted_and_leaves_no_hook() -> None:
    model = made()
    live = rt.live(model, **QUICK, clock=Ticks(1.0))

    def fails() -> None:
        model(batch()[0])
        raise KeyError("a bad batch")

    with pytest.raises(KeyError), live.step():
        fails()
    with pytest.raises(RuntimeError), live.step():
        model(torch.zeros(3, 5))  # the call itself fails
    watched(live, lambda: model(batch()[0]).sum().backward())
    assert live.figures.steps == 2
    hooks = (model._forward_hooks, model._forward_pre_hooks)
    from torch.optim import optimizer

    assert not any(hooks) and not optimizer._global_optimizer_post_hooks


def test_cuda_events_are_read_in_seconds_when_the_device_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.waited = False

        def record(self, stream: object) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.waited

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, other: Event) -> float:
            assert other.waited
            return 250.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    events = session.marks_for(torch.device("cuda:0"), None)
    start, end = events.now(), events.now()
    assert start.stream == "stream of cuda:0"
    assert not events.passed(end)
    assert events.between(start, end) == 0.25
    assert events.passed(end)


# -- nothing of the loop changes -------------------------------------------------------------------


def trained(live_with: dict[str, Any] | None) -> tuple[list[float], list[Tensor], Any]:
    """The losses of a loop, then its state: weights, buffers, gradients, optimizer, generators."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    live = rt.live(model, **live_with) if live_with is not None else None
    losses = []
    for size in (8, 8, 4, 8, 8, 4, 8):
        x, y = batch(size)
        if live is not None:
            live.begin()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if live is not None:
            live.end()
            assert live.figures is not None  # traces in the midst of the training
        losses.append(loss.item())
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *model.buffers(), *states]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    modes = [part.training for part in model.modules()]
    dicts = [sorted(vars(part)) for part in model.modules()]
    return losses, tensors, (torch.get_rng_state().tolist(), random.getstate(), modes, dicts)


@pytest.mark.parametrize("profile", [0, 2])
def test_a_training_that_is_watched_is_the_same_training(profile: int) -> None:
    random.seed(0)
    alone = trained(None)
    beside = trained({"chip": CHIP, "warmup": 1, "profile": profile})
    assert alone[0] == beside[0]
    assert all(torch.equal(a, b) for a, b in zip(alone[1], beside[1], strict=True))
    assert alone[2] == beside[2]


# -- what is off -----------------------------------------------------------------------------------


@torch.library.custom_op("rooftrace_tests::nap", mutates_args=())
def nap(x: Tensor) -> Tensor:
    """What torch does in an instant, and a bad kernel in 300 ms."""
    time.sleep(0.3)
    return x.clone()


@nap.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.ops.rooftrace_tests.nap(self.body(x)))


def test_a_slow_op_is_off_with_its_module_and_line_and_the_rest_is_shown() -> None:
    model = Slow().eval()

    def step() -> None:
        with torch.no_grad():
            model(batch()[0])
            torch.linalg.inv(torch.eye(8))  # outside of the module

    live = rt.live(model, chip=CHIP, warmup=1, profile=2)
    result = watched(live, step, 6).result
    first = result.off[0]
    assert first.name == "rooftrace_tests.nap"
    assert first.lost > 0.09
    assert all(other.lost <= first.lost for other in result.off)
    line = Slow.forward.__code__.co_firstlineno + 1
    assert first.source.endswith(f"test_live.py:{line}")
    assert "aten::linalg_inv" in {name.replace("_ex", "") for name in result.outside_graph}
    assert result.matched is not None and 0.5 < result.matched < 1
    assert (result.profiled, result.figures.steps) == (3, 2)  # the first warms the profiler up
    text = str(live)
    assert "nap" in text and "off" in text and f"test_live.py:{line}" in text
    assert "two devices" in text  # an L4 beside a CPU


def test_a_profile_of_other_work_is_listed_by_op() -> None:
    model = Slow().eval()
    live = rt.live(model, chip=CHIP, warmup=0, profile=1)

    def step() -> None:
        with torch.no_grad():
            model(batch()[0])
        for _ in range(3):
            nap(batch()[0])

    result = watched(live, step, 3).result
    assert result.off == () and result.matched is None
    assert next(iter(result.outside_graph)) == "rooftrace_tests::nap"
    assert result.outside_graph["rooftrace_tests::nap"] > 4 * 0.09
    assert any(note.startswith("kernels are not compared") for note in result.notes)
    assert "rooftrace_tests::nap" in str(result)


def test_a_profiler_of_the_loop_is_left_alone() -> None:
    model = made()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        live = rt.live(model, chip=CHIP, warmup=0, profile=1)
        watched(live, lambda: model(batch()[0]).sum().backward(), 3)
    assert any(event.key == "aten::addmm" for event in own.key_averages())
    assert any("profiler of the loop's own" in note for note in live.result.notes)


def test_a_loop_that_ends_early_ends_the_profiler() -> None:
    model = made()
    with rt.live(model, chip=CHIP, warmup=0, profile=5) as live:
        watched(live, lambda: model(batch()[0]).sum().backward(), 3)
    assert not torch.autograd._profiler_enabled()
    assert live.result.profiled == 3
    result = live.result  # of the two that ran
    assert result.validation is not None or result.outside_graph


# -- what is printed -------------------------------------------------------------------------------


def test_a_result_prints_becomes_a_page_and_json() -> None:
    model = made()

    @rt.live(model, **QUICK, clock=Ticks(1.0, 0.25))
    def step(size: int) -> float:
        loss = model(batch(size)[0]).square().mean()
        loss.backward()
        return loss.item()

    assert step(8) > 0
    live: LiveSession = step.live  # type: ignore[attr-defined]
    assert "250.0 ms" in str(live) and "samples/s" in str(live) and "32" in str(live)
    page = as_markdown(live.result)
    assert page.startswith("## A loop beside its prediction") and "| step, mean |" in page
    told = json.loads(json.dumps(live.result.to_dict()))
    assert told["schema"] == "rooftrace.live/1" and told["seconds"] == 0.25
    assert "Net on l4" in repr(live) and "250.0 ms" in repr(live.result)
    assert "<table" in live._repr_html_()


def test_a_session_without_a_timed_step_prints() -> None:
    text = " ".join(str(rt.live(made(), **QUICK)).split())
    assert "0 steps timed" in text and "the steps after these: run more, or fewer" in text
    assert "step, mean" not in text and "–" not in text
    assert "ran on a CPU, predicted for NVIDIA L4" in text


# -- the chip at hand, and bad requests ------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gib", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA H200", 140.4, "h200-sxm"),
        ("NVIDIA L4", 22.5, "l4"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-sxm-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-sxm-40"),
        ("NVIDIA A100 80GB PCIe", 79.3, "a100-pcie-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-pcie-40"),
        ("NVIDIA H100 PCIe", 79.2, "h100-pcie"),  # other rates under nearly the same name
        ("Tesla T4", 14.6, "t4"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-sxm2-32"),
    ],
)
def test_a_gpu_is_told_by_its_name_and_its_memory(device: str, gib: float, chip: str) -> None:
    assert profiles.name_of(device, int(gib * 2**30)) == chip


@pytest.mark.parametrize(
    ("device", "gib"),
    [
        ("NVIDIA H100 CNX", 79.2),  # other rates under nearly the same name
        ("NVIDIA A100-SXM-64GB", 63.4),  # another memory, and a slower one
        ("Tesla P40", 22.4),
    ],
)
def test_a_gpu_that_cannot_be_told_is_an_error_that_names_the_option(
    device: str, gib: float
) -> None:
    with pytest.raises(RequestError, match=rf'{device}.*say chip="NAME", one of .*h100-sxm'):
        profiles.name_of(device, int(gib * 2**30))


def test_a_cpu_without_a_chip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def measured(device: str, budget_s: float) -> Any:
        asked.append((device, budget_s))
        return load_chip(CHIP)

    monkeypatch.setattr(profiles, "measure_chip", measured)
    profiles._measured.cache_clear()
    assert rt.live(made()).chip.name == CHIP
    assert rt.live(made()).chip.name == CHIP
    assert asked == [("cpu", 8.0)]
    profiles._measured.cache_clear()


@pytest.mark.parametrize(
    ("modules", "how", "message"),
    [
        ((), {}, "pass the module"),
        ((print,), {}, "expected the modules that a step calls, got builtin_function_or_method"),
        ((nn.Linear(2, 2, device="meta"),), {}, "Linear is on meta: expected cpu or cuda"),
        ((nn.Linear(2, 2),), {"warmup": -1}, "warmup=-1: expected a whole number from 0 on"),
        ((nn.Linear(2, 2),), {"kinds": 0}, "kinds=0: expected a whole number from 1 on"),
        ((nn.Linear(2, 2),), {"graph": 3}, "graph=3: expected an OpGraph"),
        ((nn.Linear(2, 2),), {"profile": True}, "profile=True: expected a whole number"),
    ],
)
def test_a_bad_request_is_one_clear_error(modules: Any, how: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rt.live(*modules, **{"chip": CHIP, **how})


def test_steps_of_a_session_do_not_nest() -> None:
    live = rt.live(made(), **QUICK)
    with pytest.raises(RequestError, match="a step of this session runs already"), live.step():
        live.begin()
    with pytest.raises(RequestError, match="a step ends that did not begin"):
        live.end()


def test_a_module_that_does_not_trace_is_timed_and_says_why() -> None:
    class Stubborn(Net):
        def forward(self, x: Tensor) -> Tensor:
            if x.device.type == "meta":
                raise OSError("no weights\nhere")
            return super().forward(x)

    model = Stubborn()
    live = watched(rt.live(model, **QUICK), lambda: model(batch()[0]).sum().backward())
    assert live.figures.seconds is not None and live.figures.uncounted == 2
    assert any("no weights" in note for note in live.result.notes)
