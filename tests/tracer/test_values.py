"""What is known while tracing is exact; what is not is assumed by a named policy and on record."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.tracer.inputs.calls import random_tokens
from rooftrace.tracer.values import choices
from rooftrace.tracer.values.choices import uniform
from rooftrace.tracer.values.values import MAX_SAME_BRANCH
from tests.releases import with_implementations


def at(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows)


def written_through_a_view() -> int:
    z = torch.zeros(4, dtype=torch.long)
    view = z.view(2, 2)
    view[0, 1] = 5
    z.add_(1)
    return int(view[0, 1].item()) * 10 + int(z[0].item())


def one_of_two_equal_results_changed() -> list[int]:
    start = torch.arange(3)
    first, second = start + 1, start + 1
    first.add_(10)
    return second.tolist()  # type: ignore[no-any-return]


def made_again_after_a_write() -> list[int]:
    start = torch.arange(3)
    first = start + 1
    first += 10
    return (start + 1).tolist()  # type: ignore[no-any-return]


def made_again_after_a_write_to_a_view() -> list[int]:
    first = torch.arange(3)
    first[1:].mul_(5)
    return torch.arange(3).tolist()  # type: ignore[no-any-return]


def swapped_arguments() -> list[int]:
    a, b = torch.tensor([1, 0]).bool(), torch.tensor([0, 1]).bool()
    return [*torch.where(a, a, b).tolist(), *torch.where(a, b, a).tolist()]


@pytest.mark.parametrize(
    ("computed", "expected"),
    [
        (lambda: torch.arange(5).sum().item(), 10),
        (lambda: torch.linspace(0, 1, 5)[1].item(), 0.25),
        (lambda: torch.tensor([[1, 2], [3, 4]]).max().item(), 4),
        (lambda: torch.arange(3)[torch.tensor([True, False, True])].tolist(), [0, 2]),
        (lambda: at([[1, 2], [3, 4]])[at([[1, 0], [0, 1]]).bool()].tolist(), [1, 4]),
        (lambda: torch.arange(4).nonzero().tolist(), [[1], [2], [3]]),
        (lambda: f"{torch.tensor(3)}-{torch.tensor(0.5):.2f}", "3-0.50"),
        (lambda: (torch.ones(3) * 2).numpy().tolist(), [2.0, 2.0, 2.0]),
        (lambda: [int(v) for v in torch.arange(3)], [0, 1, 2]),
        (lambda: bool(torch.arange(4).gt(2).any()), True),
        (lambda: torch.equal(torch.arange(3), torch.tensor([0, 1, 2])), True),
        (lambda: torch.allclose(torch.ones(2), torch.ones(2) + 1e-3), False),
        (lambda: torch.tensor([3, 1, 3]).unique().tolist(), [1, 3]),
        (lambda: torch.tensor([0, 2, 2]).bincount().tolist(), [1, 0, 2]),
        (lambda: torch.arange(2).repeat_interleave(torch.tensor([1, 3])).tolist(), [0, 1, 1, 1]),
        (lambda: torch.arange(4).cpu().tolist(), [0, 1, 2, 3]),
        (lambda: torch.full((2,), 7).add_(1).tolist(), [8, 8]),
        (written_through_a_view, 61),
        (one_of_two_equal_results_changed, [1, 2, 3]),
        (made_again_after_a_write, [1, 2, 3]),
        (made_again_after_a_write_to_a_view, [0, 1, 2]),
        (swapped_arguments, [1, 1, 0, 0]),
    ],
)
def test_small_values_are_computed_exactly(
    computed: Callable[[], Any], expected: Any, module: Callable[..., nn.Module]
) -> None:
    seen = []

    def forward(self: Any, x: Tensor) -> Tensor:
        seen.append(computed())
        return self.lin(x)

    graph = rt.trace(module(forward), torch.ones(1, 8))
    assert seen == [expected]
    assert not graph.assumptions


STATEMENTS: dict[str, Callable[[dict[int, Tensor], int, int], Any]] = {
    "sum": lambda kept, a, b: kept[a] + kept[b],
    "more": lambda kept, a, b: kept[a] + b,
    "fresh": lambda kept, a, b: torch.arange(6).view(2, 3),
    "tail": lambda kept, a, b: kept[a][..., -1:],
    "turned": lambda kept, a, b: kept[a].flip(-1),
    "order": lambda kept, a, b: kept[a].argsort(-1),
    "add_": lambda kept, a, b: kept[a].add_(b),
    "written": lambda kept, a, b: kept[a][..., :1].mul_(b),
    "put": lambda kept, a, b: kept[a].copy_(kept[b][..., :1]),
}
"""What a program of whole numbers may do with two of the tensors that it keeps."""


@pytest.mark.parametrize("known", [True, False])
@settings(max_examples=40, deadline=None)
@given(
    program=st.lists(
        st.tuples(st.sampled_from(sorted(STATEMENTS)), *[st.integers(0, 3)] * 3), max_size=12
    )
)
def test_programs_compute_what_they_compute_without_a_trace(
    program: list[tuple[str, int, int, int]], known: bool
) -> None:
    def results(x: Tensor) -> list[Any]:
        kept = {
            slot: torch.arange(6).view(2, 3) if known else (x * 3)[:6].view(2, 3)
            for slot in range(4)
        }
        for name, target, a, b in program:
            kept[target] = STATEMENTS[name](kept, a, b)
        return [kept[slot].tolist() for slot in range(4)]

    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(results(x))
            return x + 1

    x = torch.arange(float(1 << 15))  # larger than what is carried along: computed when asked for
    try:
        wanted = results(x)
    except RuntimeError:  # shapes that do not go together
        assume(False)
    seen: list[Any] = []
    rt.trace(Program(), x)
    assert seen == [wanted]


def test_the_values_of_inputs_and_buffers_are_known(module: Callable[..., nn.Module]) -> None:
    seen = []

    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        seen.append((lengths.max().item(), self.table[1].item(), self.plain.tolist()))
        return self.lin(x)

    written = module(forward, plain=torch.tensor([4]))
    written.register_buffer("table", torch.tensor([1, 9]))
    graph = rt.trace(written, torch.ones(1, 8), torch.tensor([3, 5]))
    assert seen == [(5, 9, [4])]
    assert not graph.assumptions


def test_a_constructor_may_ask_for_a_value(tmp_path: Any) -> None:
    (tmp_path / "made.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    rates = [r.item() for r in torch.linspace(0, 0.4, 3)]\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(rates[2])), (torch.ones(2, 8),)\n"
    )
    graph = rt.tools.trace_target(f"{tmp_path}/made.py:build", ["training"])["training"]
    dropout = next(op for op in graph.ops if op.name == "aten.native_dropout")
    assert dropout.arguments["p"] == pytest.approx(0.4)


# -- assumptions -----------------------------------------------------------------------------------


def test_an_unknown_condition_is_taken_as_false_and_said(model: Callable[..., Any]) -> None:
    case = model("control_flow")  # if x.abs().amax() > 1e3: x = x * gate
    graph = rt.trace(case.module.to("meta"), **case.kwargs)
    assert [(a.kind, a.value) for a in graph.assumptions] == [("branch", False)]
    assert not any(op.name == "aten.sigmoid" for op in graph.ops)
    asked = [op for op in graph.ops if op.kind == "sync"]
    assert [op.assumptions for op in asked] == [(graph.assumptions[0].id,)]


def test_the_user_can_say_which_way_a_condition_goes(model: Callable[..., Any]) -> None:
    case = model("control_flow")
    graph = rt.trace(case.module, branches={0: True}, **case.kwargs)
    assert [a.value for a in graph.assumptions] == [True]
    assert any(op.name == "aten.sigmoid" for op in graph.ops)


def test_a_branch_that_fails_is_tried_the_other_way(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not (self.lin(x).sum() > 0):
            raise ValueError("the sum must be positive")
        return self.lin(x)

    graph = rt.trace(module(forward), torch.empty(1, 8, device="meta"))
    assert [(a.kind, a.value) for a in graph.assumptions] == [("branch", True)]


def test_a_loop_that_waits_for_an_unknown_condition_ends(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.lin(x)
        while not x.norm() < 1:
            x = x / 2
        return x

    graph = rt.trace(module(forward), torch.empty(1, 8, device="meta"))
    assert sum(op.name == "aten.div" for op in graph.ops) == MAX_SAME_BRANCH
    assert [a.value for a in graph.assumptions] == [False, True]


def test_half_of_an_unknown_mask_is_taken_as_true(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(
        module(lambda self, x: x[self.lin(x).sum(1) > 0]), torch.empty(6, 8, device="meta")
    )
    assert graph.values[graph.outputs[0]].shape == (3, 8)
    assert [(a.kind, a.value) for a in graph.assumptions] == [("density", 0.5)]


def test_an_unknown_number_is_taken_as_one(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x.repeat(int(self.lin(x).sum().long().item()) + 1, 1)

    graph = rt.trace(module(forward), torch.empty(3, 8, device="meta"))
    assert graph.values[graph.outputs[0]].shape == (6, 8)
    assert [a.kind for a in graph.assumptions] == ["value"]


def test_unknown_scores_choose_every_class_equally_often(module: Callable[..., nn.Module]) -> None:
    counts = []

    def forward(self: Any, x: Tensor) -> Tensor:
        _, chosen = self.lin(x).topk(2, dim=-1)
        counts.extend(torch.bincount(chosen.flatten(), minlength=8).tolist())
        return x

    graph = rt.trace(module(forward), torch.empty(12, 8, device="meta"))
    assert counts == [12 * 2 // 8] * 8
    assert [(a.kind, a.value) for a in graph.assumptions] == [("routing", 8)]


@with_implementations
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_what_follows_from_routing_says_that_it_rests_on_it(
    name: str, model: Callable[..., Any]
) -> None:
    case = model(name, "grouped_mm")
    graph = rt.trace(case.module.to("meta"), **case.kwargs)
    routing = {a.id for a in graph.assumptions if a.kind == "routing"}
    grouped = [op for op in graph.ops if op.name == "aten._grouped_mm"]
    experts = {"mixtral": 4, "deepseek": 8}[name]
    missed = experts * (1 - 2 / experts) ** 16  # by 16 tokens, each with any two of them
    (touched,) = {op.facts["groups_touched"] for op in grouped}
    assert touched == pytest.approx(experts - missed)
    assert all(set(op.assumptions) & routing for op in grouped)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_is_made_of_tensors_of_one_element(
    device: str, module: Callable[..., nn.Module]
) -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Any:
        made = torch.tensor([0, *lengths.cumsum(0)], device=device)
        return [self.lin(x[made[i] : made[i + 1]]) for i in range(2)]

    graph = rt.trace(module(forward), torch.empty(5, 8, device="meta"), torch.tensor([2, 3]))
    assert [graph.values[i].shape for i in graph.outputs] == [(2, 8), (3, 8)]
    assert not graph.assumptions


def test_an_unknown_number_is_zero_where_the_code_fails_with_one(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.lin(x).reshape(-1, 8 + int(x.sum()))  # type: ignore[no-any-return]

    graph = rt.trace(module(forward), torch.empty(1, 8, device="meta"))
    assert graph.values[graph.outputs[0]].shape == (1, 8)
    (assumption,) = graph.assumptions
    assert (assumption.kind, assumption.value) == ("value", 0)
    assert assumption.text.endswith("is taken as zeros")
    with pytest.raises(rt.types.TraceError):
        rt.trace(module(forward), torch.empty(1, 8, device="meta"), assume={"value": 2})


# -- facts -----------------------------------------------------------------------------------------


def test_an_embedding_knows_how_many_rows_it_reads() -> None:
    graph = rt.trace(nn.Embedding(100, 8), torch.tensor([[5, 7, 5], [7, 9, 5]]))
    assert graph.ops[0].facts == {"rows_touched": 3}


def test_a_part_of_a_vocabulary_reads_as_many_rows_as_are_expected(
    module: Callable[..., nn.Module],
) -> None:
    def part(ids: Tensor) -> Tensor:
        outside = (ids < 10) | (ids >= 40)
        own = ids.clone() - 10
        own[outside] = 0
        return own

    def forward(self: Any, ids: Tensor) -> Tensor:
        return nn.functional.embedding(part(ids), torch.empty(30, 8, device=ids.device))

    def apart(self: Any, ids: Tensor, others: Tensor) -> Tensor:
        rows = part(ids) + part(others)
        return nn.functional.embedding(rows, torch.empty(60, 8, device=ids.device))

    ids = random_tokens((2, 6), 105)  # of 100 classes, 5 to 104
    (op,) = (op for op in rt.trace(module(forward), ids).ops if op.name == "aten.embedding")
    assert op.facts == {"uniform_over": 100, "own_rows": 29}  # 11 to 39; all others read row 0
    graph = rt.trace(module(apart), ids, random_tokens((2, 6), 105))
    (op,) = (op for op in graph.ops if op.name == "aten.embedding")
    assert list(op.facts) == ["rows_touched"]  # two draws have no classes in common


def test_attention_counts_the_pairs_that_its_mask_leaves(module: Callable[..., nn.Module]) -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()

    def forward(self: Any, q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    graph = rt.trace(module(forward), torch.ones(2, 3, 4, 8))
    attention = next(op for op in graph.ops if op.name == "rooftrace.attention")
    assert (attention.facts["mask"], attention.facts["visible_pairs"]) == ("causal", 1 + 2 + 3 + 4)


def test_a_mask_that_is_the_same_for_all_rows_counts_for_each(
    module: Callable[..., nn.Module],
) -> None:
    keep = torch.arange(40_000) % 4 > 0  # over a billion pairs: never written out

    def forward(self: Any, q: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=keep[None, None, None])

    graph = rt.trace(module(forward), torch.empty(1, 1, 40_000, 8, device="meta"))
    attention = next(op for op in graph.ops if op.name == "rooftrace.attention")
    assert attention.facts["visible_pairs"] == 40_000 * 30_000


def test_an_op_that_answers_with_a_python_value_is_asked_with_known_values() -> None:
    class Aligned(nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            if torch._nested_tensor_from_mask_left_aligned(x, keep):
                return x.sum()
            return x

    x, left = torch.ones(2, 4, 3, device="meta"), torch.arange(4) < torch.tensor([[2], [3]])
    for keep, ops in ((left, ["aten.sum"]), (left.flip(1), [])):
        graph = rt.trace(Aligned(), x, keep)
        assert [op.name for op in graph.kernels()] == ops
        assert graph.ops[0].kind == "sync"
        assert [a.kind for a in graph.assumptions] == ["value"], "x is not known"


# -- what the user decides -------------------------------------------------------------------------


def _asks(self: Any, x: Tensor) -> Tensor:
    """A branch, a mask and a number that only real weights would decide."""
    y = self.lin(x)
    if y.sum() > 0:
        y = y.relu()
    return y[y[:, 0] > 0].repeat(int(y.sum().long().item()), 1)


def test_the_user_can_say_what_is_taken(module: Callable[..., nn.Module]) -> None:
    taken = {"branch": True, "density": 0.75, "value": 4}
    graph = rt.trace(module(_asks), torch.ones(8, 8), assume=taken)
    assert graph.values[graph.outputs[0]].shape == (8 * 3 // 4 * 4, 8)
    assert any(op.name == "aten.relu" for op in graph.ops)
    assert {a.kind: a.value for a in graph.assumptions} == taken
    assert all(a.text.endswith(", as given") for a in graph.assumptions)


def test_nothing_of_a_mask_may_be_taken_as_true(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(module(_asks), torch.empty(8, 8, device="meta"), assume={"density": 0})
    assert graph.values[graph.outputs[0]].shape == (0, 8)


@pytest.mark.parametrize(
    ("assume", "shapes"),
    [
        ({"density@0": 0.25}, [(2, 8), (1, 8)]),  # a quarter of 8, then half of that
        ({"density@1": 1.0}, [(4, 8), (4, 8)]),
        ({"density@*": 1.0}, [(8, 8), (8, 8)]),
        ({"density@*": 1.0, "density@1": 0.5}, [(8, 8), (4, 8)]),  # the last that fits
        ({"density@1": 0.5, "density": 1.0}, [(8, 8), (4, 8)]),  # a module's own before all
    ],
)
def test_what_is_taken_can_differ_by_module(
    assume: dict[str, Any], shapes: list[tuple[int, int]]
) -> None:
    class Select(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(1) > 0]

    x = torch.empty(8, 8, device="meta")  # unknown
    graph = rt.trace(nn.Sequential(Select(), Select()), x, assume=assume)
    selected = [op.outputs[0] for op in graph.ops if op.name == "aten.index"]
    assert [graph.values[i].shape for i in selected] == shapes


def test_a_branch_that_the_user_decided_is_not_tried_the_other_way(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not (self.lin(x).sum() > 0):
            raise ValueError("the sum must be positive")
        return self.lin(x)

    with pytest.raises(rt.types.TraceError, match="the sum must be positive"):
        rt.trace(module(forward), torch.ones(1, 8), assume={"branch": False})


def test_a_loop_whose_condition_the_user_holds_true_ends(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.lin(x)
        while x.norm() > 1:
            x = x / 2
        return x

    graph = rt.trace(module(forward), torch.ones(1, 8), assume={"branch": True})
    assert sum(op.name == "aten.div" for op in graph.ops) == MAX_SAME_BRANCH


@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_routing_by_lot_is_on_record(name: str, model: Callable[..., Any]) -> None:
    case = model(name, "grouped_mm")
    graph = rt.trace(case.module, **case.kwargs, assume={"routing": "uniform"})
    routing = [a for a in graph.assumptions if a.kind == "routing"]
    assert routing and {a.facts["policy"] for a in routing} == {"uniform"}


@pytest.mark.parametrize(
    ("rows", "k", "classes"), [(1, 2, 8), (4, 2, 16), (8, 8, 256), (64, 8, 256), (3, 1, 4)]
)
def test_choices_by_lot_hit_as_many_classes_as_chance_does(rows: int, k: int, classes: int) -> None:
    chosen = uniform((rows, k), classes, -1)
    assert all(len(set(row)) == k for row in chosen.tolist()), "distinct in each row"
    lots = random.Random(0)
    tries = [
        len({c for _ in range(rows) for c in lots.sample(range(classes), k)}) for _ in range(2000)
    ]
    mean = sum(tries) / len(tries)
    assert abs(chosen.unique().numel() - mean) <= 0.6
    assert torch.equal(chosen, uniform((rows, k), classes, -1)), "the same every time"


@pytest.mark.parametrize(
    ("shape", "dimension"), [((4, 3, 5), 1), ((3, 5), 0), ((4, 5), None), ((), None)]
)
def test_choices_by_lot_have_the_shape_that_is_asked_for(
    shape: tuple[int, ...], dimension: int | None
) -> None:
    chosen = uniform(shape, 7, dimension)
    assert tuple(chosen.shape) == shape
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 7
    if dimension is not None:
        ordered = chosen.sort(dimension).values
        assert bool((ordered.diff(dim=dimension) > 0).all()), "distinct along the dimension"


def test_a_question_about_an_unknown_tensor_does_not_make_it() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            torch._nested_tensor_from_mask_left_aligned(x, keep)
            return keep

    huge = torch.empty(2, 4, 1 << 38, device="meta")  # 8 TiB
    graph = rt.trace(Asks(), huge, torch.arange(4) < torch.tensor([[2], [3]]))
    assert [a.kind for a in graph.assumptions] == ["value"]


def test_an_assumption_names_the_op_that_needed_it(module: Callable[..., nn.Module]) -> None:
    def chosen(self: Any, x: Tensor) -> Any:
        best = self.lin(x).topk(2).indices
        return x[best[0].tolist()] if self.lin(x).sum() > 0 else x[best[1].tolist()]

    graph = rt.trace(module(chosen), torch.empty(8, 8, device="meta"))
    needed = {assumption.kind: assumption.op for assumption in graph.assumptions}
    assert needed == {"routing": "aten.topk", "branch": "aten._local_scalar_dense"}


def test_a_choice_that_nothing_reads_is_no_assumption(module: Callable[..., nn.Module]) -> None:
    """The places of maxima, by which a softmax that is written out shifts its scores."""

    def shifted(self: Any, x: Tensor) -> Tensor:
        scores = self.lin(x)
        return (scores - scores.max(-1, keepdim=True).values).exp()

    def placed(self: Any, x: Tensor) -> Tensor:
        scores = self.lin(x)
        return x[scores.max(-1).indices]

    kinds = [
        [a.kind for a in rt.trace(module(step), torch.empty(8, 8, device="meta")).assumptions]
        for step in (shifted, placed)
    ]
    assert kinds == [[], ["routing"]]


def test_one_side_of_a_conjunction_may_decide_it(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        unknown, no = self.lin(x).sum() > 0, torch.zeros((), dtype=torch.bool, device=x.device)
        if (unknown & no) or not (unknown | ~no) or torch.logical_and(no, unknown):
            x = self.lin(x)
        return self.lin(x)

    graph = rt.trace(module(forward), torch.ones(2, 8))
    assert [op.name for op in graph.ops].count("aten.addmm") == 2
    assert not graph.assumptions


def test_a_loop_goes_on_while_it_is_unknown_whether_it_is_done(
    module: Callable[..., nn.Module],
) -> None:
    """What is tested is taken as false: of `not unfinished` that is that it is unfinished."""

    def forward(self: Any, x: Tensor) -> Any:
        steps = torch.zeros((), dtype=torch.long, device=x.device)
        finished = False
        while not finished:
            x, steps = self.lin(x), steps + 1
            finished = not ((x.sum() > 0) & (steps < 5))
        return x

    with torch.device("meta"):  # no real data to ask
        made, x = module(forward), torch.ones(2, 8)
    graph = rt.trace(made, x)
    assert [op.name for op in graph.ops].count("aten.addmm") == 5
    assert any(a.kind == "branch" and "True" in a.text for a in graph.assumptions)


@given(
    st.lists(st.integers(-50, 50), max_size=40),
    st.sampled_from([torch.int32, torch.int64, torch.uint8]),
    st.sampled_from([1, 1_000_003]),
)
def test_different_numbers_are_counted_as_a_set_counts_them(numbers, dtype, apart):
    index = torch.tensor([n % 50 if dtype == torch.uint8 else n for n in numbers], dtype=dtype)
    index = index if dtype == torch.uint8 else index * apart
    assert choices.counted(index) == len(set(index.tolist()))
    assert choices.counted(index.reshape(1, -1)) == len(set(index.tolist()))
