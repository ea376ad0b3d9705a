"""Policies of routing: expected numbers against enumeration and simulation, files, and draws."""

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.graph.assumptions import MOST_EXPONENT, Policy, decided, policy_of
from rooftrace.tracer.values.choices import Choices, chosen, expected_distinct, shares_of

pytestmark = pytest.mark.quick

POLICIES = ("expected", "balanced", "uniform", "skewed:1.0", "skewed:3")


def reached(sets: Sequence[Sequence[int]], chances: Sequence[float], rows: int) -> float:
    """The mean number of classes in `rows` independent draws of sets: all combinations."""
    mean = 0.0
    for picks in itertools.product(range(len(sets)), repeat=rows):
        chance = math.prod(chances[pick] for pick in picks)
        mean += chance * len({c for pick in picks for c in sets[pick]})
    return mean


def in_turn(weights: Sequence[float], k: int) -> dict[tuple[int, ...], float]:
    """Every order of k classes, drawn one after the other by weight, with its chance."""
    orders = {}
    for order in itertools.permutations(range(len(weights)), k):
        chance, left = 1.0, sum(weights)
        for c in order:
            chance, left = chance * weights[c] / left, left - weights[c]
        orders[order] = chance
    return orders


# -- expected numbers ------------------------------------------------------------------------------


@given(st.integers(2, 5), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_uniform_choices_are_counted_by_enumeration(classes: int, k: int, rows: int) -> None:
    k = min(k, classes)
    sets = list(itertools.combinations(range(classes), k))
    mean = reached(sets, [1 / len(sets)] * len(sets), rows)
    assert expected_distinct(rows, k, classes) == pytest.approx(mean)


def test_eight_tokens_of_deepseek_reach_57_experts_and_not_64() -> None:
    lots = random.Random(0)
    tries = [len({c for _ in range(8) for c in lots.sample(range(256), 8)}) for _ in range(4000)]
    mean = sum(tries) / len(tries)
    deviation = (sum((n - mean) ** 2 for n in tries) / len(tries)) ** 0.5
    assert expected_distinct(8, 8, 256) == pytest.approx(mean, abs=4 * deviation / 4000**0.5)
    assert expected_distinct(8, 8, 256) == pytest.approx(57.42, abs=0.005)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(POLICIES[:1] + POLICIES[3:]))
@settings(max_examples=40, deadline=None)
def test_more_tokens_reach_more_and_one_token_its_own(classes: int, k: int, policy: str) -> None:
    k = min(k, classes, 40)
    shares = shares_of(policy_of(policy), k, classes)
    numbers = [expected_distinct(rows, k, classes, shares) for rows in (1, 2, 5, 17, 200)]
    assert numbers[0] == pytest.approx(k)
    assert numbers == sorted(numbers)
    assert numbers[-1] <= classes * (1 + 1e-9)
    if shares is None:
        assert expected_distinct(10**9, k, classes) == classes


@given(st.integers(2, 6), st.integers(1, 4), st.floats(0.1, MOST_EXPONENT), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_skewed_choices_are_counted_by_enumeration(
    classes: int, k: int, exponent: float, rows: int
) -> None:
    k = min(k, classes)
    policy = policy_of(f"skewed:{exponent}")
    orders = in_turn([(c + 1) ** -policy.exponent for c in range(classes)], k)
    mean = reached(list(orders), list(orders.values()), rows)
    shares = shares_of(policy, k, classes)
    assert expected_distinct(rows, k, classes, shares) == pytest.approx(mean, abs=1e-6)


def test_skewed_choices_are_the_largest_of_noisy_scores() -> None:
    """Top-8 of log weights plus Gumbel noise, for 8 tokens at a time."""
    generator = torch.Generator().manual_seed(2)
    scores = -torch.arange(1, 129).log()
    noise = -torch.empty(4000, 8, 128).exponential_(generator=generator).log()
    chosen_ids = (scores + noise).topk(8).indices.flatten(1).sort(1).values
    counts = 1 + (chosen_ids.diff(dim=1) > 0).sum(1).double()
    number = expected_distinct(8, 8, 128, shares_of(policy_of("skewed:1"), 8, 128))
    error = 4 * float(counts.std()) / len(counts) ** 0.5
    assert number == pytest.approx(float(counts.mean()), abs=error)
    assert number < expected_distinct(8, 8, 128)


def test_a_skew_of_many_classes_is_nearly_the_integral() -> None:
    """Above a size, all that arrive until k are expected are taken; here beside the integral."""
    from rooftrace.graph.formulas import polynomials

    weights = torch.arange(1, 257, dtype=torch.float64).pow(-1.0)
    near = torch.from_numpy(polynomials._until_k(weights.numpy(), 8))
    exact = shares_of(policy_of("skewed"), 8, 256)
    assert float(near.sum()) == pytest.approx(8)
    assert expected_distinct(8, 8, 256, near) == pytest.approx(
        expected_distinct(8, 8, 256, exact), rel=0.01
    )
    assert shares_of(policy_of("skewed"), 50, 4096).sum() == pytest.approx(50)  # type: ignore[union-attr]


def test_a_histogram_is_counted_by_drawing_from_what_it_counts() -> None:
    """Sets of two of four classes, as often as they were seen; the histogram counts classes."""
    seen = [(0, 1), (0, 1), (0, 2), (1, 3), (0, 1)]
    counts = [sum(c in pair for pair in seen) for c in range(4)]
    mean = reached(seen, [1 / len(seen)] * len(seen), rows=3)
    shares = shares_of(policy_of(counts), 2, 4)
    assert expected_distinct(3, 2, 4, shares) == pytest.approx(mean)


def test_a_class_cannot_be_chosen_twice_by_a_token() -> None:
    with pytest.raises(RequestError, match=r"class 1 has 75.0% of the counts, but of 2 .* 50.0%"):
        shares_of(policy_of([1, 6, 1]), 2, 3)


# -- draws -----------------------------------------------------------------------------------------


@given(
    st.integers(1, 40), st.integers(1, 8), st.integers(1, 64), st.sampled_from(POLICIES),
    st.sampled_from([0, 1, None]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_draw_reaches_the_number_next_to_the_expected_one(
    rows: int, k: int, classes: int, policy: str, dimension: int | None
) -> None:
    k = 1 if dimension is None else min(k, classes)
    shape = {0: (k, rows), 1: (rows, k), None: (rows,)}[dimension]
    made: Choices = chosen(policy_of(policy), shape, classes, dimension)
    assert tuple(made.indices.shape) == shape
    drawn = set(made.indices.flatten().tolist())
    assert drawn <= set(range(classes)) and len(drawn) == made.facts["drawn"]
    if policy not in ("balanced", "uniform"):
        assert abs(len(drawn) - made.facts["distinct"]) <= 0.5 + 1e-9
    if policy != "balanced" or dimension == 1:
        by_row = made.indices.T if dimension == 0 else made.indices.reshape(rows, k)
        assert all(len(set(row)) == k for row in by_row.tolist())


def test_balanced_choices_are_what_they_were() -> None:
    made = chosen(policy_of("balanced"), (8, 8), 256, -1)
    assert made.indices.flatten().tolist() == list(range(64))
    assert made.facts["distinct"] == 64


def test_experts_of_a_draw_are_spread_over_all() -> None:
    """A rank that holds every eighth part of the experts gets an eighth of them, or one off."""
    experts = chosen(Policy(), (8, 8), 256, -1).indices.unique()
    held = torch.bincount(experts // 32, minlength=8)
    assert int(held.max()) - int(held.min()) <= 1


def test_a_draw_of_a_histogram_has_its_proportions() -> None:
    made = chosen(policy_of([30, 20, 10, 0]), (100, 2), 4, -1)
    counts = torch.bincount(made.indices.flatten(), minlength=4).tolist()
    assert counts == [100, 67, 33, 0]  # 200 choices as 3 : 2 : 1


def test_a_histogram_of_other_classes_leaves_the_choice_uniform() -> None:
    made = chosen(policy_of([1, 1, 1]), (8, 8), 256, -1)
    assert made.facts["policy"] == "expected"
    assert "(histogram:3 counts has other classes)" in made.text


# -- what a user writes ----------------------------------------------------------------------------

FILES = {
    "a.json": "[30, 20, 10, 0]",
    "b.json": json.dumps({"0": 30, "2": 10, "1": 20}),
    "c.csv": "tokens\n30\n20\n10\n0\n",
    "d.csv": "expert,tokens\n2,10\n0,30\n1,20\n",
    "e.csv": "30\n20\n10\n0",
}


@pytest.mark.parametrize("name", FILES)
def test_a_histogram_is_read_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    policy = policy_of(f"histogram:{path}")
    made = chosen(policy, (100, 2), 4, -1)
    assert str(policy) == made.facts["policy"] == f"histogram:{path}"
    assert torch.bincount(made.indices.flatten()).tolist() == [100, 67, 33]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, -2]", "class 1 has -2: expected a count"),
        ("[1, true]", "class 1 has True: expected a count"),
        ("[0, 0]", "expected counts by class, at least one of them above 0"),
        ("", "expected rows of one count, or of a class and its count"),
        ("1,2,3\n4,5,6", "expected rows of one count, or of a class and its count"),
        ("0,5\n0,6", "class '0': expected a number from 0 to 1,048,575 once"),
        ('{"many": 3}', "class 'many': expected a number from 0"),
        ("[1, 2", "not a readable histogram"),
        ("5\nx", "class 1 has 'x': expected a count"),
    ],
)
def test_a_file_that_is_no_histogram_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.write_text(text)
    with pytest.raises(RequestError, match=f"assumption routing=histogram.*: .*{message}"):
        rt.capture(nn.Linear(2, 2), assume={"routing": f"histogram:{path}"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("skewed:steep", "exponent 'steep': expected a number from 0 to 8"),
        ("skewed:-1", "exponent '-1': expected a number from 0 to 8"),
        ("skewed:nan", "exponent 'nan'"),
        ("expectd", "did you mean 'expected'"),
        ("uniform:3", "expected one of expected"),
        ("histogram:/nowhere/at/all", "cannot be read"),
        (3, "expected one of expected"),
        ([], "expected counts by class"),
    ],
)
def test_a_policy_that_there_is_not_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"assumption routing@gate=.*{message}"):
        rt.capture(nn.Linear(2, 2), assume={"routing@gate": value})


def test_an_assumption_of_a_module_wins_over_one_of_all() -> None:
    asked = {"routing@*.gate": "balanced", "routing": "skewed:1"}
    assert decided(asked, "routing", "layers.1.gate") == "balanced"
    assert decided(asked, "routing", "layers.1.up") == "skewed:1"


class Router(nn.Module):
    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.scores, self.k = nn.Linear(8, experts), k

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).topk(self.k, dim=-1).indices  # type: ignore[no-any-return]


class Gated(nn.Module):
    """Two routers, each with a product by the weights of the experts that a token chose."""

    def __init__(self, experts: int, k: int, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = Router(experts, k), Router(experts, k)
        self.weights = nn.Parameter(torch.empty(experts, 8, 8))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for router in (self.first, self.second):
            x = torch.einsum("td,tkde->te", x, self.read(self.weights, router(x)))
        return x


def gated(experts: int = 16, k: int = 2, cast: bool = False) -> nn.Module:
    def read(weights: Tensor, ids: Tensor) -> Tensor:
        return (weights.bfloat16().float() if cast else weights)[ids]

    with torch.device("meta"):
        return Gated(experts, k, read)


def touched(graph: Any) -> list[float]:
    return [op.facts["rows_touched"] for op in graph.ops if op.name == "aten.index"]


@pytest.mark.parametrize("cast", [False, True])
def test_a_policy_may_be_of_one_module(cast: bool) -> None:
    x = torch.empty(5, 8, device="meta")
    graph = rt.trace(gated(cast=cast), x, assume={"routing@second": "balanced"})
    assert touched(graph) == [pytest.approx(16 * (1 - (14 / 16) ** 5)), 5 * 2]
    assert touched(rt.trace(gated(), x, assume={"routing": "balanced"})) == [10, 10]


def test_tokens_are_not_taken_for_experts() -> None:
    """As many tokens as experts: x[ids] reads tokens, each by the draw."""

    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            ids = self.gate(x).topk(2, dim=-1).indices
            return x[ids.flatten().argsort() // 2]

    graph = rt.trace(Permuted(), torch.empty(4, 4, device="meta"))
    assert touched(graph) == [4]


def test_a_histogram_that_fits_no_choice_is_refused() -> None:
    x = torch.empty(5, 8, device="meta")
    with pytest.raises(RequestError, match=r"3 classes, but the choices are among 16$"):
        rt.trace(gated(), x, assume={"routing": [1, 1, 1]})
    with pytest.raises(RequestError, match=r"3 classes, but the choices are among 16$"):
        module = gated()
        with rt.capture(module, assume={"routing": [1, 1, 1]}):
            module(x)


def test_a_saved_graph_keeps_the_facts(tmp_path: Path) -> None:
    graph = rt.trace(gated(), torch.empty(5, 8, device="meta"))
    rt.save(graph, tmp_path / "graph.json")
    again = rt.load(tmp_path / "graph.json")
    assert again.assumptions == graph.assumptions
    assert again.assumptions[0].facts["distinct"] == pytest.approx(16 * (1 - (14 / 16) ** 5))
    text = json.loads((tmp_path / "graph.json").read_text())
    for data in text["graphs"].values():
        data["assumptions"] = [item[:6] for item in data["assumptions"]]  # as older files have it
    (tmp_path / "older.json").write_text(json.dumps(text))
    older = rt.load(tmp_path / "older.json")
    assert [item.facts for item in older.assumptions] == [{}] * len(graph.assumptions)


@pytest.mark.parametrize("policy", ["skewed:1", "balanced"])
def test_a_form_under_a_decided_policy_is_what_a_trace_gives(policy: str) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 16, bias=False, dtype=torch.bfloat16)
            self.weights = nn.Parameter(torch.empty(16, 8, 8, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = self.gate(x).topk(4).indices.flatten()
            ends = torch.bincount(ids, minlength=16).cumsum(0).int()
            return torch._grouped_mm(x[ids.argsort() // 4], self.weights, ends)

    def tokens(count: int) -> torch.Tensor:
        return torch.empty(count, 8, dtype=torch.bfloat16, device="meta")

    with torch.device("meta"):
        module = Experts()
    how: dict[str, Any] = {"assume": {"routing": policy}}
    form = rt.tools.form(module, tokens(4), over={"0.0": range(1, 17)}, **how)
    for count in (1, 5, 16):
        assert form.graph(**{"0.0": count}) == rt.trace(module, tokens(count), **how)
