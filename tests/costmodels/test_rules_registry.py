"""Which ops have rules, and what every rule keeps to."""

import ast
from pathlib import Path

import pytest
import torch
from tests.costmodels.rules_support import cost, index, meta, price, views

from rooftrace.costmodels.registry import all_rules, find_rule

OURS = [r for r in all_rules() if r.source == "rooftrace"]


def test_every_rule_names_an_op_that_torch_has():
    aten = [r.name.removeprefix("aten.") for r in OURS if r.name.startswith("aten.")]
    assert [name for name in aten if not hasattr(torch.ops.aten, name)] == []
    assert len(aten) > 1000
