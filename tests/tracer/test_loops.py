"""Loops of equal turns: a few turns are run, and one stands for the rest."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftrace.tracer.recording import Call
from rooftrace.tracer.recording.recorder import Recorder
from rooftrace.tracer.recording.taperecords import META_KEY, Recorded
from rooftrace.tracer.values.masks import META

F = nn.functional
STEPS = 20
Scan = Callable[[Tensor], Any]


class Scanning(nn.Module):
    """Calls a function; with a weight, so that there is something to train."""

    def __init__(self, scan: Scan) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=META))
        self.scan = scan

    def forward(self, x: Tensor) -> Any:
        return self.scan(x * self.weight)


def record(module: nn.Module, x: Tensor, train: bool = False, **options: Any) -> Recorder:
    """What one run of the module leaves in a recorder; train: with the backward of its output."""
    recorder = Recorder(repeat_calls=False, **options)
    recorder.name_modules(module)
    recorder.enter(x, "input", "x")
    with recorder, META, torch.set_grad_enabled(train):
        output = module(x)
        if train:
            recorder.here.part = "backward"
            output = getattr(output, "logits", output)
            with torch.no_grad():
                seed = torch.ones_like(output)
            engine: Any = torch.autograd.graph
            engine._engine_run_backward(
                (output,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    recorder.close()
    module.zero_grad()
    return recorder


def scanned(scan: Scan, steps: int = STEPS, **options: Any) -> Recorder:
    return record(Scanning(scan), torch.ones(2, steps, 4, device=META), **options)


def ops_of(recorder: Recorder) -> list[tuple[str, Recorded]]:
    return [
        (str(node.target), node.meta[META_KEY])
        for node in recorder.graph.nodes
        if isinstance(node.meta.get(META_KEY), Recorded)
    ]


def totals(recorder: Recorder) -> Counter[Any]:
    """How often each op runs, with the turns left out; but for views of the gradient of a list."""
    found: Counter[Any] = Counter()
    for name, op in ops_of(recorder):
        if op.view and op.origin.function in ("StackBackward0", "CatBackward0"):
            continue
        origin, shapes = op.origin, tuple(spec.shape for spec in op.specs)
        serial, turn = origin.loop or (-1, -1)
        times = recorder.loops[serial].count if serial in recorder.loops and turn == 2 else 1
        found[name, shapes, origin.part, origin.module, origin.source] += times
    return found


# -- loops that are cut short ----------------------------------------------------------------------


def states(x: Tensor) -> Tensor:
    state, out = torch.zeros(2, 4), []
    for t in range(x.shape[1]):
        state = torch.tanh(state * 0.5 + x[:, t])
        out.append(state)
    return torch.stack(out, 1)


def written(x: Tensor) -> Tensor:
    state, out = torch.zeros(2, 4), torch.zeros_like(x)
    for t in range(x.size(1)):
        state = F.silu(state) + x[:, t]
        out[:, t] = state
    return out


def two_states(x: Tensor) -> Tensor:
    cell = hidden = torch.zeros(2, 4)
    out: list[Tensor] = []
    for t in range(x.shape[1]):
        gates, scale = x[:, t, None] + hidden[:, None], 2
        gate = torch.sigmoid(gates[:, 0])
        cell = gate * cell + (1 - gate) * scale
        hidden = gate * cell.tanh()
        out.append(hidden)
        del gates
    return torch.stack(out, 1)


def chunks(x: Tensor) -> Tensor:
    size = 2
    out, total = [], torch.zeros(2, 2, 4)
    for i in range(0, x.shape[1] // size):
        total = total + x[:, i * size : (i + 1) * size]
        out.append(total)
    return torch.cat(out, 1)


def stepped(x: Tensor) -> Tensor:
    state, out = torch.zeros(2, 4), []
    for t in range(1, x.shape[1], 2):
        state = state + x[:, t] - x[:, t - 1]
        out.append(state)
    return torch.stack(out, 1)


def reversed_order(x: Tensor) -> Tensor:
    state, out = torch.zeros(2, 4), torch.empty_like(x)
    for t in range(x.shape[1] - 1, -1, -1):
        state *= 0.5
        state = state + x[:, t]
        out[:, t] = state
    return out


def read_one_by_one(x: Tensor) -> Tensor:
    state, out = torch.zeros(2, 4), []
    for t in range(x.shape[1]):
        state = state + x[:, t]
        out.append(state)
    result = torch.zeros(2, 4)
    for item in out:
        result = result + item * item
    return result


def unread_end(x: Tensor) -> Tensor:
    """The last turn leaves a state that nobody reads, and so do those before it, in part."""
    first = second = third = torch.zeros(2, 4)
    out = torch.zeros_like(x)
    for t in range(x.shape[1]):
        out[:, t] = first
        first = first * x[:, t] + second
        second = second * x[:, t] + third
        third = third * x[:, t]
    return out


def into_known(x: Tensor) -> Tensor:
    """What is written to the zeros is known in the first turn only."""
    state, out = torch.zeros(2, 4), torch.zeros(2, x.shape[1], 4)
    for t in range(x.shape[1]):
        out[:, t] = state
        state = state + x[:, t]
    return out


ROLLED = (
    into_known,
    states,
    written,
    two_states,
    chunks,
    stepped,
    reversed_order,
    read_one_by_one,
    unread_end,
)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("scan", ROLLED)
def test_the_turns_left_out_are_those_of_the_loop_as_it_is_written(scan: Scan, train: bool) -> None:
    rolled = scanned(scan, 40, train=train)
    assert len(rolled.loops) == 1
    assert totals(rolled) == totals(scanned(scan, 40, train=train, roll_loops=False))


@pytest.mark.parametrize("scan", [states, written, reversed_order])
def test_every_turn_has_its_label(scan: Scan) -> None:
    recorder = scanned(scan)
    labels = [op.origin.loop for _, op in ops_of(recorder) if op.origin.loop]
    assert [label for label, _ in groupby(labels)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    (loop,) = recorder.loops.values()
    assert loop.count == STEPS - 3  # 0, 1 and the last are run for themselves
    assert loop.function == scan.__name__
    file, _, line = loop.source.rpartition(":")
    assert file.endswith("test_loops.py")
    start = scan.__code__.co_firstlineno
    assert start < int(line) < start + 5


def test_backward_has_the_labels_of_the_ops_that_it_differentiates() -> None:
    recorder = scanned(written, train=True)
    parts: dict[tuple[str, int], list[str]] = {}
    for name, op in ops_of(recorder):
        if op.origin.loop:
            parts.setdefault((op.origin.part, op.origin.loop[1]), []).append(name)
    turns = sorted(turn for part, turn in parts if part == "backward")
    assert turns == sorted(turn for part, turn in parts if part == "forward")
    assert parts["backward", 2] == parts["backward", 1]
    assert "aten.silu_backward.default" in parts["backward", 2]


def test_a_list_has_as_many_elements_as_turns() -> None:
    recorder = scanned(states)
    (stack,) = [n for n in recorder.graph.nodes if n.target is torch.ops.aten.stack.default]
    elements: Any = stack.args[0]
    assert len(elements) == STEPS
    assert [len([*same]) for _, same in groupby(elements)] == [1, 1, STEPS - 3, 1]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("scan", [two_states, chunks])
def test_ops_do_not_grow_with_the_length(scan: Scan, train: bool) -> None:
    short, long = (len(ops_of(scanned(scan, steps, train=train))) for steps in (40, 1000))
    assert short == long


def test_joined_with_others_a_list_keeps_the_gradients_of_the_others() -> None:
    def joined(x: Tensor) -> Tensor:
        out = [torch.zeros(0), x[:, 0] * 2]
        for t in range(x.shape[1]):
            out.append(x[:, t] * 3)
        return torch.cat(out, 1)

    rolled = scanned(joined, train=True)
    assert rolled.loops
    assert totals(rolled) == totals(scanned(joined, train=True, roll_loops=False))


def test_a_list_of_the_callers_may_be_read_by_the_caller() -> None:
    def collect(x: Tensor, out: list[Tensor]) -> Tensor:
        for t in range(x.shape[1]):
            out.append(x[:, t] * 3)
        return torch.stack(out, 1)

    def caller(x: Tensor) -> Tensor:
        out: list[Tensor] = []
        result = collect(x, out).sum(1)
        for item in out:
            result = result + item * item
        return result

    rolled = scanned(caller, 40, train=True)
    assert rolled.loops
    assert totals(rolled) == totals(scanned(caller, 40, train=True, roll_loops=False))


def test_what_is_not_recorded_is_cut_short_too() -> None:
    turns: list[int] = []

    class Counting(Recorder):
        def record(self, call: Call, *args: Any, **more: Any) -> None:
            turns.append(call.func is torch.ops.aten.tanh.default)
            super().record(call, *args, **more)

    recorder = Counting()
    module = Scanning(states)
    recorder.name_modules(module)
    with recorder, META, torch.no_grad(), recorder.paused():
        output = module(torch.ones(2, 100, 4))
    assert (sum(turns), tuple(output.shape)) == (4, (2, 100, 4))


# -- loops that are run as they are written --------------------------------------------------------


def with_condition(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t]
        if t > 5:
            y = y * 2
    return y


def with_break(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t] * 2
        break
    return y


def with_number(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t] * t
    return y


def with_square(x: Tensor) -> Any:
    for t in range(4):
        y = x[:, t * t]
    for t in range(x.shape[1]):
        y = x[:, (t * t) % 2]
    return y


def with_numbers_appended(x: Tensor) -> Any:
    sizes: list[int] = []
    for t in range(x.shape[1]):
        y = x[:, t] * 2
        sizes.append(3)
    return y


def with_list_read(x: Tensor) -> Any:
    out = [x[:, 0]]
    for t in range(x.shape[1]):
        out.append(out[-1] * x[:, t])
    return out


def with_list_indexed(x: Tensor) -> Any:
    parts = x.unbind(1)
    for t in range(len(parts)):
        y = parts[t] * 2
    return y


def with_known_value(x: Tensor) -> Any:
    positions = torch.arange(x.shape[1])
    for t in range(x.shape[1]):
        y = x[:, 0] * positions[t]
    return y


def with_known_mask(x: Tensor) -> Any:
    masks = torch.arange(x.shape[1]) < torch.arange(x.shape[1])[:, None]
    for t in range(x.shape[1]):
        y = x[:, masks[t]] * 2
    return y


def with_value_asked(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t] * x[0, t, 0].item()
    return y


def with_growing_shape(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, :t] * 2
    return y


def with_ragged_end(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t : t + 6] * 2
    return y


def with_growing_state(x: Tensor) -> Any:
    state = x[:, :1]
    for t in range(x.shape[1]):
        state = torch.cat((state, x[:, t, None]), 1)
    return state


def with_counter(x: Tensor) -> Any:
    count = 0
    for t in range(x.shape[1]):
        y = x[:, t] * count
        count = count + 1
    return y


def with_older_state(x: Tensor) -> Any:
    old = new = x[:, 0]
    for t in range(x.shape[1]):
        old, new = new, old * x[:, t]
    return new


def with_function(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = states(x[:, t, None])
    return y


def with_inner_loop(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t]
        for _ in range(2):
            y = y * 2
    return y


def with_list_of_lists(x: Tensor) -> Any:
    out: list[Any] = []
    for t in range(x.shape[1]):
        out.append((x[:, t], 1))
    return out


def with_else(x: Tensor) -> Any:
    for t in range(x.shape[1]):
        y = x[:, t]
    else:
        y = x[:, 0] * 2
    return y


def too_short(x: Tensor) -> Any:
    for t in range(5):
        y = x[:, t] * 2
    return y


WRITTEN = tuple(v for k, v in [*globals().items()] if k.startswith(("with_", "too_")))


@pytest.mark.parametrize("scan", WRITTEN)
def test_a_loop_of_unequal_turns_is_run_as_it_is_written(scan: Scan) -> None:
    recorder = scanned(scan)
    assert not recorder.loops
    plain = scanned(scan, roll_loops=False)
    assert totals(recorder) == totals(plain)


def test_where_values_turn_in_backward_the_loop_is_run_as_it_is_written() -> None:
    def swapped(x: Tensor) -> Tensor:
        one = two = x[:, 0]
        for t in range(x.shape[1]):
            one, two = two * x[:, t], one + 1
        return one

    assert scanned(swapped).loops
    assert not scanned(swapped, train=True).loops


def test_nothing_is_cut_short_on_request_or_where_nothing_is_recorded() -> None:
    assert not scanned(states, roll_loops=False).loops
    assert not scanned(states, record=False).loops


# -- the name `range` ------------------------------------------------------------------------------


def own_range(x: Tensor) -> Any:
    made = range(9)
    assert isinstance(made, range) and issubclass(type(made), range)
    assert type(made) == range  # noqa: E721
    assert {range: 1}[type(made)] == 1
    assert [*range(2)] == [0, 1] and range(1, 9, 2)[-1] == 7 and len(range(3)) == 3
    assert [*reversed(range(3))] == [2, 1, 0] and range(3) == range(0, 3)
    assert repr(range) == "<class 'range'>" and range.__name__ == "range"
    with pytest.raises(TypeError):
        range("a")
    return x * 2


def test_range_is_what_it_always_was() -> None:
    assert len(ops_of(scanned(own_range))) == 2


def test_the_name_is_taken_away_again() -> None:
    def failing(x: Tensor) -> Any:
        assert "range" in globals()
        for t in range(x.shape[1]):
            y = x[:, t] @ x[:, t]
        return y

    for scan in (states, failing):
        try:
            scanned(scan)
        except RuntimeError as error:
            assert "must have same reduction dim" in str(error)
        assert "range" not in globals()
    assert scanned(states).loops  # and the label of the loop that failed is gone


@pytest.fixture
def helper() -> Iterator[ModuleType]:
    """A module of the user's, with a scan in it."""
    made = ModuleType("a_helper")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_module_with_a_range_of_its_own_keeps_it(helper: ModuleType) -> None:
    seen: list[Any] = []
    helper.range = lambda n: seen.append(n) or range(n)  # type: ignore[attr-defined]
    kind = type("Other", (Scanning,), {"__module__": helper.__name__})
    record(kind(states), torch.ones(2, STEPS, 4, device=META))
    assert helper.range(3) == range(3)
    assert seen == [3]


# -- models of others ------------------------------------------------------------------------------


def mamba() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)
    with META:
        return transformers.MambaForCausalLM(config)


def rwkv() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.RwkvConfig(
        hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, vocab_size=64
    )
    with META:
        return transformers.RwkvForCausalLM(config)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("build", [mamba, rwkv])
def test_a_model_of_scans_has_the_ops_of_the_loops_as_they_are_written(
    build: Callable[[], Any], train: bool
) -> None:
    ids = torch.zeros(1, 32, dtype=torch.long, device=META)
    rolled, plain = (
        record(build().train(train), ids.clone(), train, roll_loops=roll) for roll in (True, False)
    )
    assert len(rolled.loops) == 2  # one in each layer
    assert totals(rolled) == totals(plain)
    assert len(ops_of(rolled)) < len(ops_of(plain)) / 3


def test_a_model_of_scans_has_as_many_ops_at_any_length() -> None:
    for train in (False, True):
        short, long = (torch.zeros(1, n, dtype=torch.long, device=META) for n in (32, 128))
        counts = [len(ops_of(record(mamba(), ids, train))) for ids in (short, long)]
        assert counts[0] == counts[1]
