"""What can be asked of a trace, and what is said of what cannot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.graph.assumptions import ASSUMABLE, parse_assumption
from rooftrace.tracer.inputs.calls import call_inputs, last_token, parsed_inputs, random_tokens
from rooftrace.tracer.request import Options, Request
from rooftrace.tracer.values import REAL_VALUE

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("branch=true", "branch", True),
        ("branch@model.layers.*.gate=False", "branch@model.layers.*.gate", False),
        ("density = 0.1", "density", 0.1),
        ("density=1", "density", 1),
        ("value@encoder=3", "value@encoder", 3),
        ("value=2.5", "value", 2.5),
        ("routing=uniform", "routing", "uniform"),
    ],
)
def test_an_assumption_is_read_from_text(text: str, key: str, value: Any) -> None:
    read = parse_assumption(text)
    assert read == (key, value)
    assert type(read[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("density", r"assumption 'density': expected KIND\[@MODULE\]=VALUE"),
        ("density=", r"assumption 'density=': expected KIND\[@MODULE\]=VALUE"),
        ("densty=0.1", "assumption 'densty': .* kinds are branch, density, value, routing"),
        ("branch@=true", "assumption 'branch@': expected KIND, KIND@MODULE or KIND@FILE:LINE"),
        ("branch=0.5", "assumption branch=0.5: expected True or False"),
        ("branch=1", "assumption branch=1: expected True or False"),
        ("density=1.5", "assumption density=1.5: expected a share from 0 to 1"),
        ("density=true", "assumption density=True: expected a share from 0 to 1"),
        ("value=nan", "assumption value=nan: expected a number"),
        ("value=many", "assumption value=many: expected a number"),
        ("routing=zipf", "assumption routing=zipf: expected one of expected"),
    ],
)
def test_an_assumption_that_cannot_be_made_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_assumption(text)


def test_options_refuse_what_the_text_would_be_refused_for() -> None:
    for kind in ASSUMABLE:
        with pytest.raises(RequestError, match=f"assumption {kind}=None: expected"):
            Options(assume={kind: None})


def test_an_assumption_about_a_module_that_is_not_there_names_those_that_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(
        RequestError, match=r"'density@layers.\*': no module of Sequential is called .* are \*"
    ):
        rt.trace(model, torch.ones(1, 8), assume={"density@layers.*": 0.1})


# -- sizes: whatever is asked for, nothing of that size is allocated -----------------------------


def test_of_very_many_tokens_only_the_sizes_are_known() -> None:
    few, many = random_tokens((2, 3), 100), random_tokens((100_000, 131_072), 100)
    assert REAL_VALUE in few.__dict__ and REAL_VALUE not in many.__dict__
    assert many.shape == (100_000, 131_072) and many.device.type == "meta"
    assert last_token(many).shape == (100_000, 1)


def test_an_input_of_whole_numbers_is_not_drawn_where_it_is_large() -> None:
    made = parsed_inputs({"x": "100000,131072:int64", "y": "0,3:int8", "z": "2,2:int64"})
    assert made["x"].device.type == "meta" and made["y"].shape == (0, 3)
    assert REAL_VALUE in made["z"].__dict__ and REAL_VALUE not in made["x"].__dict__


def test_a_batch_of_billions_repeats_no_value() -> None:
    module = torch.nn.Embedding(10, 4)
    inputs = call_inputs(module, (torch.tensor([[1, 2], [3, 4]]),), {}, batch=4_000_000_000)
    assert inputs.args[0].shape == (4_000_000_000, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_tokens((3037000500, 3037000500), 100),
        lambda: parsed_inputs({"x": "3037000500,3037000500:fp32"}),
        lambda: parsed_inputs({"x": "3037000500,3037000500:int64"}),
        lambda: parsed_inputs({"x": f"{2**62},0,{2**62}:int8"}),
        lambda: call_inputs(torch.nn.ReLU(), (torch.ones(1, 8),), {}, batch=2**62),
    ],
)
def test_an_input_that_torch_cannot_count_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(RequestError, match=r"an input of .* x .* torch counts up to 9.22e\+18"):
        make()


@pytest.mark.parametrize("name", ["batch", "seq", "kv"])
@pytest.mark.parametrize("size", [2**63, 10**400, 10**5000], ids=["63 bits", "400", "5000"])
def test_a_size_of_more_than_63_bits_is_refused(name: str, size: int) -> None:
    with pytest.raises(RequestError, match=rf"--{name}: a whole number of \d+ bits; torch counts"):
        Request(**{name: size})


@pytest.mark.parametrize("text", ["y" * 5000, "9" * 400, f"{'9' * 5000}:fp32"])
def test_a_shape_that_is_none_is_quoted_shortly(text: str) -> None:
    with pytest.raises(RequestError, match="expected SHAPE:DTYPE") as refused:
        parsed_inputs({"x": text})
    assert len(str(refused.value)) < 200
