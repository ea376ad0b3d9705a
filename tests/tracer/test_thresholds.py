"""Sizes walked across each threshold of the tracer: what a step costs goes on as it was, or the
graph says what is assumed from there on.  docs/limits.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion import plan
from rooftrace.graph.formulas import polynomials
from rooftrace.tracer.inputs import calls
from rooftrace.tracer.recording import by_value, higher_order, realdata, substitutes
from rooftrace.tracer.repeats import outside
from rooftrace.tracer.values import choices, known, masks, values

META = torch.device("meta")


def costs(graph: rt.types.OpGraph) -> dict[str, float]:
    """FLOP, bytes and seconds of a step."""
    made = rt.estimate(plan(graph, "eager"), "h100-sxm")
    return {"flop": made.flops, "bytes": plan(graph, "eager").bytes.total, "seconds": made.t_est}


def walked(
    trace: Callable[[int], rt.types.OpGraph], sizes: Sequence[int]
) -> list[rt.types.OpGraph]:
    """The graphs at rising sizes; each costs more by the share that the size grows, or by less."""
    graphs = [trace(size) for size in sizes]
    for (low, before), (high, after) in zip(
        zip(sizes, graphs, strict=True), list(zip(sizes, graphs, strict=True))[1:], strict=False
    ):
        for name, cost in costs(before).items():
            ratio = costs(after)[name] / cost if cost else 1.0
            assert 0.97 < ratio < high / low * 1.03, (name, low, high, ratio)
    return graphs


def around(threshold: int) -> list[int]:
    return [threshold - 1, threshold, threshold + 1]


# -- shapes of ops without a meta kernel: substitutes._MAX_ZEROS -----------------------------------


class Recognised(nn.Module):
    """CTC over a projection: [B, T, 80] frames, 200 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(80, 512)

    def forward(self, frames: Tensor, targets: Tensor, steps: Tensor, symbols: Tensor) -> Tensor:
        scores = self.project(frames).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, targets, steps, symbols)


def recognised(batch: int) -> rt.types.OpGraph:
    lengths = (torch.full((batch,), 2048), torch.full((batch,), 200))
    frames = torch.empty(batch, 2048, 80, device=META)
    targets = torch.ones(batch, 200, dtype=torch.long)
    with META:
        model = Recognised()
    return rt.trace(model, frames, targets, *lengths, phase="training", optimizer="none")


def test_a_ctc_loss_has_its_shapes_at_any_batch() -> None:
    assert substitutes._MAX_ZEROS == 16 * 2048 * 512  # elements of the scores of 16
    for graph in walked(recognised, [15, 16, 17]):
        (loss,) = (op for op in graph.ops if op.name == "aten._ctc_loss")
        batch = graph.values[loss.outputs[0]].shape[0]
        assert graph.values[loss.outputs[1]].shape == (batch, 2048, 2 * 200 + 1)
        assert not graph.assumptions


def test_the_shapes_of_a_ctc_loss_are_those_of_a_cpu() -> None:
    scores = torch.randn(30, 4, 7).log_softmax(-1)
    targets, steps, symbols = (
        torch.randint(1, 7, (4, 9)), torch.tensor([30, 20, 30, 25]), torch.tensor([9, 3, 5, 1])
    )  # fmt: skip
    real = torch.ops.aten._ctc_loss.Tensor(scores, targets, steps, symbols)
    graph = rt.trace(torch.ops.aten._ctc_loss.Tensor, scores.to(META), targets, steps, symbols)
    (op,) = (op for op in graph.ops if op.name == "aten._ctc_loss")
    assert [graph.values[i].shape for i in op.outputs] == [tuple(t.shape) for t in real]


def test_an_op_without_a_meta_kernel_has_its_shape_beyond_what_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = torch.library.Library("walked", "FRAGMENT")
    library.define("pairs(Tensor a, Tensor b) -> Tensor")
    library.impl("pairs", lambda a, b: a[:, None, :3].expand(-1, b.shape[0], -1).clone(), "CPU")
    monkeypatch.setattr(substitutes, "_MAX_ZEROS", 100 * 8 + 50 * 8)
    try:
        for rows in (99, 100, 101, 3000):
            graph = rt.trace(
                torch.ops.walked.pairs,
                torch.empty(rows, 8, device=META),
                torch.empty(50, 8, device=META),
            )
            (op,) = (op for op in graph.ops if op.name == "walked.pairs")
            assert graph.values[op.outputs[0]].shape == (rows, 50, 3)
            (said,) = graph.assumptions
            assert said.kind == "shape" and ("fewer rows" in said.text) == (rows > 100)
    finally:
        library._destroy()


# -- choices of experts: marks.MAX_INTEGERS, marks.MAX_CHOSEN, results.MAX_KEPT --------------------


class Routed(nn.Module):
    """Experts in a loop over a one-hot mask, as much published code has them."""

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.up = nn.Parameter(torch.empty(experts, 16, 8))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        index = self.router(x).topk(self.chosen).indices
        mask = F.one_hot(index, len(self.up)).permute(2, 1, 0)
        out = torch.zeros(len(x), 16, device=x.device)
        for expert in mask.sum((-1, -2)).nonzero().flatten():
            _, rows = torch.where(mask[expert])
            out.index_add_(0, rows, F.linear(x[rows], self.up[expert]))
        return out


def routed(rows: int, experts: int = 8, chosen: int = 2) -> rt.types.OpGraph:
    with META:
        return rt.trace(Routed(experts, chosen), torch.empty(rows, 8))


def products(graph: rt.types.OpGraph) -> float:
    """Rows of experts that are multiplied."""
    return sum(cost.flops(("matmul",)) for cost in plan(graph, "eager").op_costs)


def test_rows_of_experts_are_those_that_were_chosen_at_any_number_of_tokens() -> None:
    edge = masks.MAX_INTEGERS // (8 * 2)  # where the one-hot mask has so many elements
    for graph in walked(routed, around(edge)):
        rows = graph.values[graph.inputs[-1]].shape[0]
        assert products(graph) == 2 * rows * 8 * 8 + 2 * (2 * rows) * 8 * 16
        assert {item.kind for item in graph.assumptions} == {"routing"}


def test_beyond_what_is_carried_a_choice_is_an_assumption_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {item.kind for item in routed(100).assumptions} == {"routing"}
    for name in ("MAX_INTEGERS", "MAX_CHOSEN"):
        monkeypatch.setattr(masks, name, 1600)
    assert {item.kind for item in routed(100).assumptions} == {"routing"}
    assert {item.kind for item in routed(101).assumptions} == {"routing", "value"}


def test_an_order_of_choices_is_undone_at_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As grouped products do: rows in the order of their experts go back to their tokens."""

    class Sorted(Routed):
        def forward(self, x: Tensor) -> Tensor:
            order = self.router(x).topk(self.chosen).indices.flatten().argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            return x[order // self.chosen][back]

    def read(rows: int) -> int:
        with META:
            graph = rt.trace(Sorted(8, 2), torch.empty(rows, 8))
        return [op.facts["rows_touched"] for op in graph.ops if op.name == "aten.index"][-1]

    monkeypatch.setattr(masks, "MAX_INTEGERS", 200)
    assert [read(rows) for rows in (100, 101)] == [200, 202]


def test_more_choices_than_are_followed_are_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_CHOSEN", 200)
    for rows, kind in ((100, "routing"), (101, "value")):
        said = [item for item in routed(rows).assumptions if item.text.startswith("aten.topk")]
        assert {item.kind for item in said} == {kind}


def test_results_that_are_not_kept_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = costs(routed(300))
    monkeypatch.setattr(known, "MAX_KEPT", 0)
    assert costs(routed(300)) == kept


def test_a_value_larger_than_all_kept_results_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers with experts ask for the contents of the same choices; a write shows."""
    monkeypatch.setattr(known, "MAX_KEPT", 8)
    results, value, read = known.ResultMemo(None), torch.arange(4), list[int]()
    for number in range(3):
        if number == 2:
            value += 5
        results.once(value, "content", lambda tensor: read.append(int(tensor[0])))
    assert read == [0, 5]


def test_a_size_that_the_call_says_needs_no_values() -> None:
    def repeated(x: Tensor, counts: Tensor) -> Tensor:
        return x.repeat_interleave(counts, dim=0, output_size=70)

    graph = rt.trace(repeated, torch.empty(5, 3, device=META), torch.empty(5, device=META).long())
    assert graph.values[graph.outputs[0]].shape == (70, 3) and not graph.assumptions


def test_expected_classes_go_on_where_skewed_choices_are_no_longer_integrated() -> None:
    for exponent in (0.5, 2.0):
        exact = polynomials.skewed_shares(exponent, 16, 1024)  # _MOST_SIZE classes times choices
        assert polynomials._MOST_SIZE == 16 * 1024
        near = polynomials._until_k(np.arange(1, 1025) ** -exponent, 16)
        for rows in (1, 8, 64, 1024):
            ends = (polynomials.expected_reached(rows, each) for each in (exact, near))
            assert next(ends) == pytest.approx(next(ends), rel=0.01)


def test_a_single_draw_reaches_about_as_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = [choices.uniform((64, 2), 64, 1).unique().numel()]
    monkeypatch.setattr(choices, "_MAX_DRAWN", 64 * 64 - 1)
    reached.append(choices.uniform((64, 2), 64, 1).unique().numel())
    assert reached[0] == pytest.approx(64 * (1 - (1 - 2 / 64) ** 64), abs=0.5)
    assert reached[1] == pytest.approx(reached[0], rel=0.1)


# -- inputs that are drawn: arguments.MOST_DRAWN ---------------------------------------------------


def test_tokens_that_are_too_many_to_draw_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "gpt2"
    job = dict(phase="prefill", seq=40, chip="h100-sxm")
    exact = rt.report(config, batch=2, **job).estimate("prefill")
    monkeypatch.setattr(calls, "MOST_DRAWN", 79)
    assert rt.report(config, batch=2, **job).estimate("prefill").t_est == exact.t_est


# -- turns and branches: higher_order._MAX_LOOPS, rolling MIN_TURNS, MAX_SAME_BRANCH ---------------


class Scanned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(state) + x[:, step])
        return state


def test_loops_that_are_rolled_cost_what_their_turns_do() -> None:
    def graph(turns: int) -> rt.types.OpGraph:
        with META:
            return rt.trace(Scanned(), torch.empty(4, turns, 16))

    made = [products(graph(turns)) for turns in (6, 7, 8, 9, 10)]
    assert made == [turns * 2 * 4 * 16 * 16 for turns in (6, 7, 8, 9, 10)]


def test_a_while_loop_that_is_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.while_loop import while_loop

    def repeated(x: Tensor, turns: Tensor) -> Any:
        return while_loop(lambda x, n: n > 0, lambda x, n: (x @ x, n - 1), (x, turns))[0]

    monkeypatch.setattr(higher_order, "_MAX_LOOPS", 5)
    for turns in (4, 5, 6):
        graph = rt.trace(repeated, torch.empty(4, 4, device=META), torch.tensor(turns))
        assert products(graph) == min(turns, 5) * 2 * 4 * 4 * 4
        assert bool(graph.assumptions) == (turns > 5), turns


def test_a_loop_on_an_unknown_condition_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_SAME_BRANCH", 6)

    def until(x: Tensor) -> Tensor:
        while not (x.sum() > 0).item():
            x = x @ x
        return x

    graph = rt.trace(until, torch.empty(4, 4, device=META))
    assert any("after 6 times" in item.text for item in graph.assumptions) or len(graph.ops) < 10


# -- real data: realdata.MAX_FLOP, MAX_BYTES, MAX_OPS ----------------------------------------------


@pytest.mark.parametrize("limit", ["MAX_FLOP", "MAX_BYTES", "MAX_OPS"])
def test_a_value_that_takes_too_much_is_an_assumption(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(x: Tensor, w: Tensor) -> Tensor:
        return x[(x @ w)[:, 0] > 0]

    given = (torch.randn(8, 4), torch.randn(4, 4))
    monkeypatch.setattr(masks, "MAX_FLOATS", 1)
    assert not rt.trace(chosen, *given).assumptions
    monkeypatch.setattr(realdata, limit, 1)
    assert [item.kind for item in rt.trace(chosen, *given).assumptions] == ["density"]


# -- what calls read beside their arguments: outside._MAX_ITEMS ------------------------------------

TABLE = list(range(outside._MAX_ITEMS + 1))


@pytest.mark.parametrize("size", around(outside._MAX_ITEMS))
def test_a_change_in_a_container_of_any_size_is_seen(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = [1] * size
    monkeypatch.setitem(globals(), "TABLE", table)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(TABLE[-1]):
                x = self.project(x)
            return x

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Reads() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for turn, layer in enumerate(self.layers):
                TABLE[-1] = 1 + (turn == 3)
                x = layer(x)
            return x

    with META:
        graph = rt.trace(Twice(), torch.empty(2, 8))
    assert products(graph) == 5 * 2 * 2 * 8 * 8


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[x > 0],
        lambda x: x[(x > 0)[:, 0]],
        lambda x: (x > 0).nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x[torch.isfinite(x)],
    ],
)
def test_an_unknown_mask_of_any_size_has_as_many_true_elements(
    select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for limit in (64, 1):
        monkeypatch.setattr(values, "MAX_ASSUMED", limit)
        graph = rt.trace(select, torch.empty(8, 8, device=META))
        ops = [(op.name, op.facts, [graph.values[i].shape for i in op.outputs]) for op in graph.ops]
        made.append((ops, [item.text for item in graph.assumptions]))
    assert made[0] == made[1]


def test_unknown_numbers_that_are_too_many_to_assume_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(values, "MAX_ASSUMED", 64)
    x = torch.empty(9, 8, device=META)
    with pytest.raises(rt.types.TraceError, match="depends on weights or activations"):
        rt.trace(lambda x: x.tolist(), x)
    assert by_value.ANSWERS  # the table that asks for values
