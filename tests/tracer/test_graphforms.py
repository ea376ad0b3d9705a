"""Forms of graphs beside traces at the same sizes: equal in every record, or no answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.graph.formulas import GraphForm, StructureError, Survey
from rooftrace.graph.formulas.forms import RecordForm
from tests.tracer.conftest import DEEPSEEK, TEXT, config

PLACES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(**TEXT, num_key_value_heads=2)),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(**TEXT, num_key_value_heads=2, num_local_experts=4),
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 128,
        },
    ),
    "deepseek": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**DEEPSEEK, "num_hidden_layers": 3}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(vocab_size=64, n_positions=256, n_embd=32, n_layer=1, n_head=4),
    ),
}


@cache
def target(folder: Path, family: str) -> str:
    kind, architecture, settings = PLACES[family]
    made = config(kind, architectures=[architecture], dtype="bfloat16", **settings)
    made.to_json_file(folder / f"{family}.json", use_diff=False)
    return str(folder / f"{family}.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTRACE_CACHE", "off")


def assert_equals_traces(
    form: rt.types.Form, source: Any, levels: Mapping[str, Any], count: int, phase: str, *args: Any
) -> None:
    """The form gives what is traced at random sizes of these levels."""
    draw = random.Random(count)
    for _ in range(count):
        sizes = {name: draw.choice(values) for name, values in levels.items()}
        assert form.graph(**sizes) == rt.trace(source, *args, phase=phase, **sizes)


@pytest.mark.parametrize(
    ("family", "phase"),
    [
        ("llama", "decode"),
        pytest.param("deepseek", "prefill", marks=pytest.mark.heavy),
        ("gpt2", "forward"),
    ],
)
def test_the_graph_at_any_size_is_its_trace(family: str, phase: str, folder: Path) -> None:
    source = target(folder, family)
    levels = {"batch": range(1, 17), ("kv" if phase == "decode" else "seq"): range(2, 100)}
    form = rt.tools.form(source, phase=phase, over=levels)
    assert form.regimes and all(
        regime.form.samples and len(regime.proven) > 2
        for regime in form.regimes
        if regime.low != regime.high
    )
    assert_equals_traces(form, source, levels, 2, phase)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "facts"),
    [("deepseek", {"groups_touched"}), ("gpt-oss", {"groups_touched", "rows_touched"})],
)
def test_experts_of_one_process_are_an_equal_part_of_the_reached_ones(
    family: str, facts: set[str], folder: Path
) -> None:
    """So are rows of their biases."""
    source, mesh = target(folder, family), {"tp": 2, "ep": 2}
    form = rt.tools.form(source, over={"batch": range(2, 12)}, phase="decode", kv=20, mesh=mesh)
    (regime,) = form.regimes
    assert (regime.low, regime.high) == ((2,), (11,))
    unseen = next(n for n in range(2, 12) if (n,) not in {*regime.form.samples, *regime.proven})
    traced = rt.trace(source, phase="decode", batch=unseen, kv=20, mesh=mesh)
    assert form.graph(batch=unseen) == traced
    for fact in facts:
        assert any(op.facts.get(fact, 0) % 1 for op in traced.ops)  # no whole number


@pytest.mark.slow
def test_layers_are_a_size(folder: Path) -> None:
    source = target(folder, "llama")
    name = "config.num_hidden_layers"
    form = rt.tools.form(source, phase="decode", over={name: range(3, 12)}, kv=50, batch=2)
    for layers in (4, 11):
        made = form.graph(**{name: layers})
        traced = rt.trace(source, phase="decode", kv=50, batch=2, settings={name: layers})
        assert made == traced


# -- regimes ---------------------------------------------------------------------------------------


class Branching(nn.Module):
    """More than 37 rows take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y: torch.Tensor = self.second(torch.relu(x)) if x.shape[0] > 37 else x
        return y


class Padded(nn.Module):
    """Rows are filled up to a multiple of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = -x.shape[0] % 8
        y: torch.Tensor = self.linear(nn.functional.pad(x, (0, 0, 0, more)))
        return y


def traced_with(module: nn.Module, rows: int) -> Any:
    return rt.trace(module, torch.empty(rows, 8))


def test_a_branch_on_a_size_is_found_by_halving() -> None:
    module = Branching()
    form = rt.tools.form(module, torch.empty(4, 8), over={"0.0": range(2, 200)})
    edges = sorted((regime.low[0], regime.high[0]) for regime in form.regimes)
    assert edges == [(2, 37), (38, 199)]
    for rows in (2, 36, 37, 38, 39, 150, 199):
        assert form.graph(**{"0.0": rows}) == traced_with(module, rows)


@pytest.mark.parametrize("levels", [range(1, 65), range(8, 257, 8), (8, 16, 24, 32, 40, 64, 128)])
def test_padding_never_gives_another_graph_than_the_trace(levels: Any) -> None:
    module = Padded()
    form = rt.tools.form(module, torch.empty(8, 8), over={"0.0": levels})
    for rows in (8, 9, 15, 16, 17, 40, 63, 64):
        assert form.graph(**{"0.0": rows}) == traced_with(module, rows)


class Pooled(nn.Module):
    """Halves an image's sides; a side is a multiple of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if image.shape[-1] % 4:
            raise ValueError("sides are multiples of 4")
        y: torch.Tensor = self.pool(torch.relu(self.first(image)))
        return y


def test_sizes_in_steps_are_those_that_are_traced() -> None:
    module, image = Pooled(), torch.empty(2, 3, 32, 32)
    form = rt.tools.form(module, image, over={"0.3": range(32, 257, 4), "batch": range(1, 9)})
    for batch, side in ((1, 32), (5, 100), (8, 256)):
        made = form.graph(**{"0.3": side, "batch": batch})
        assert made == rt.trace(module, torch.empty(batch, 3, 32, side))
    result = rt.sweep(module, image, over={"0.3": range(32, 257, 4), "batch": (1, 8)})
    assert len(result) == 57 * 8 and not result.cliffs("batch")[100:]
    result.crossings("0.3")
    with pytest.raises((rt.types.TraceError, ValueError), match="multiples of 4"):
        form.graph(**{"0.3": 34, "batch": 2})


# -- records ---------------------------------------------------------------------------------------


def test_a_record_of_another_structure_is_refused() -> None:
    with pytest.raises(StructureError, match="different lengths"):
        RecordForm.fitted(("x",), {(1,): (1, 2), (2,): (1, 2, 3)})
    with pytest.raises(StructureError, match="no formula gives"):
        RecordForm.fitted(("x",), {(n,): (2**n,) for n in range(1, 9)})


def test_numbers_in_texts_follow_the_sizes() -> None:
    records: dict[tuple[int, ...], Any] = {(n,): (f"{n * 1000:,} rows of 8",) for n in range(1, 9)}
    form = RecordForm.fitted(("x",), records)
    assert form.at((50,)) == ("50,000 rows of 8",)


def law_survey(law: Any, levels: Any, most: int = 120) -> list[Any]:
    """The regimes of a made-up source whose record is a law of its sizes."""
    names = tuple(f"x{i}" for i in range(len(levels)))
    survey = Survey(
        names, levels, lambda many: [(law(*n),) for n in many], most=most, form=RecordForm
    )
    return list(survey.regimes())


@pytest.mark.parametrize(
    "law",
    [
        lambda x, y: x * y if x < 40 else x + y,
        lambda x, y: max(x, y) * 8,
        lambda x, y: x * y + (100 if y >= 64 else 0),
        lambda x, y: -(-x // 8) * y,
        lambda x, y: min(x * y, 4096),
    ],
)
def test_what_is_proven_holds_at_its_corners_and_its_own_sizes(law: Any) -> None:
    levels = (range(1, 101), range(1, 101))
    for regime in law_survey(law, levels):
        for numbers in (regime.low, regime.high, *regime.proven, *regime.form.samples):
            assert regime.form.at(numbers) == (law(*numbers),)


def test_a_cut_along_one_size_leaves_regimes_that_hold_everywhere() -> None:
    def law(x: int, y: int) -> int:
        return x * y if x < 40 else x + y

    regimes = law_survey(law, (range(1, 101), range(1, 101)))
    for x in range(1, 101):
        for y in range(1, 101, 7):
            held = [regime for regime in regimes if regime.holds((x, y))]
            assert len(held) == 1 and held[0].form.at((x, y)) == (law(x, y),)


def test_between_levels_nothing_is_said_that_was_not_tried() -> None:
    regimes = law_survey(lambda x: -(-x // 8) * 8, (range(8, 801, 8),))
    assert any(regime.holds((80,)) for regime in regimes)
    assert not any(regime.holds((81,)) for regime in regimes)
    regimes = law_survey(lambda x: 3 * x, (range(8, 801, 8),))
    assert any(regime.holds((81,)) for regime in regimes)


def test_few_traces_prove_less_not_something_wrong() -> None:
    regimes = law_survey(lambda x: -(-x // 8) * 8, (range(1, 1001),), most=20)
    for regime in regimes:
        for numbers in (regime.low, regime.high):
            assert regime.form.at(numbers) == (-(-numbers[0] // 8) * 8,)


def test_a_graph_form_says_where_it_is_from() -> None:
    form = rt.tools.form(Branching(), torch.empty(4, 8), over={"0.0": range(2, 30)})
    assert all(isinstance(regime.form, GraphForm) for regime in form.regimes)
    assert "regimes from" in repr(form) and form.where()


def test_the_largest_box_is_proven_first() -> None:
    """Many structures where one size is small use up no traces that the rest needs."""

    def records(many: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(x * y,) * min(x, 10) for x, y in many]

    levels = (range(1, 101), range(1, 101))
    survey = Survey(("x", "y"), levels, records, most=60, form=RecordForm)
    regimes = list(survey.regimes())
    assert any(regime.holds((11, 50)) and regime.holds((100, 100)) for regime in regimes)


def test_nothing_is_traced_after_a_size_that_shows_a_form_wrong() -> None:
    def records(many: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(x,) * min(x, 2) for (x,) in many]  # as steps of a batch of 1

    survey = Survey(("x",), (range(1, 101),), records, form=RecordForm)
    regimes = list(survey.regimes())
    assert {(regime.low, regime.high) for regime in regimes} == {((1,), (1,)), ((2,), (100,))}
    assert survey.traces < 13


def test_a_box_with_few_sizes_that_are_asked_for_takes_no_samples() -> None:
    traced: list[tuple[int, ...]] = []

    def records(many: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        traced.extend(many)
        return [(x * y,) * min(x, 2) for x, y in many]  # as steps of a batch of 1

    levels, asked = (range(1, 101), range(16, 201)), ((), (16, 200))
    survey = Survey(("x", "y"), levels, records, form=RecordForm, asked=asked)
    regimes = {(regime.low, regime.high): regime for regime in survey.regimes()}
    assert regimes.keys() == {((2, 16), (100, 200)), ((1, 16), (1, 16)), ((1, 200), (1, 200))}
    assert regimes[(2, 16), (100, 200)].form.at((50, 99)) == (50 * 99, 50 * 99)  # between, too
    asked_of_all = len(traced)
    list(Survey(("x", "y"), levels, records, form=RecordForm).regimes())
    assert asked_of_all < len(traced) - asked_of_all


def test_a_size_of_one_value_takes_no_samples() -> None:
    def records(many: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [(3 * numbers[0],) for numbers in many]

    (alone,) = Survey(("x",), (range(1, 101),), records, form=RecordForm).regimes()
    (beside,) = Survey(("x", "y"), (range(1, 101), (7,)), records, form=RecordForm).regimes()
    assert len(beside.form.samples) == len(alone.form.samples) < 6
