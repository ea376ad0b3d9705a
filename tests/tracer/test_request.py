"""What can be asked of a trace, and what is said of what cannot."""

from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.tracer.asking.assumptions import ASSUMABLE, parse_assumption
from rooftrace.tracer.asking.request import Options


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("branch=true", "branch", True),
        ("branch@model.layers.*.gate=False", "branch@model.layers.*.gate", False),
        ("density = 0.1", "density", 0.1),
        ("density=1", "density", 1),
        ("value@encoder=3", "value@encoder", 3),
        ("value=2.5", "value", 2.5),
        ("balanced-routing=uniform", "balanced-routing", "uniform"),
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
        ("densty=0.1", "assumption 'densty': .* kinds are branch, density, value, balanced-rou"),
        ("branch@=true", "assumption 'branch@': expected KIND or KIND@MODULE"),
        ("branch=0.5", "assumption branch=0.5: expected True or False"),
        ("branch=1", "assumption branch=1: expected True or False"),
        ("density=1.5", "assumption density=1.5: expected a share from 0 to 1"),
        ("density=true", "assumption density=True: expected a share from 0 to 1"),
        ("value=nan", "assumption value=nan: expected a number"),
        ("value=many", "assumption value=many: expected a number"),
        ("balanced-routing=zipf", "assumption balanced-routing=zipf: expected balanced .* uniform"),
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
