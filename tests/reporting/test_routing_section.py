"""The section on routing: distinct experts, tokens per active expert, and the policy."""

from pathlib import Path
from typing import Any

import pytest
import torch

import rooftrace as rt
from tests.releases import with_implementations

TOKENS, TOP, EXPERTS = 6, 2, 16
CLOSED = EXPERTS * (1 - (1 - TOP / EXPERTS) ** TOKENS)  # 8.82


def made(implementation: str = "grouped_mm", **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=3, num_local_experts=EXPERTS,
        num_experts_per_tok=TOP, experts_implementation=implementation)  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, 1, dtype=torch.long)
    return rt.report(
        model,
        input_ids=ids,
        phases=("forward",),
        chip="h200-sxm",
        execution="eager",
        **settings,
    )


@with_implementations
def test_a_report_has_the_distinct_experts_of_its_layers(tmp_path: Path) -> None:
    report = made()
    (row,) = report.to_dict()["routing"]
    assert row == {
        "phase": "forward",
        "module": "model.layers.*.mlp.gate",
        "layers": 3,
        "tokens": TOKENS,
        "chosen": TOP,
        "experts": EXPERTS,
        "distinct": pytest.approx(CLOSED),
        "tokens_each": pytest.approx(TOKENS * TOP / CLOSED),
        "drawn": 9,
        "counted": pytest.approx(CLOSED),
        "policy": "expected",
    }
    flat = " ".join(str(report).split())
    assert "routing: forward 8.82 of 16 experts a layer, 1.36 tokens each (expected)" in flat
    report.write(tmp_path, formats=("md",))
    page = (tmp_path / "report.md").read_text()
    assert "## Routing" in page and "| Tokens per active expert |" in page


def test_the_rounding_of_a_loop_over_experts_is_said() -> None:
    report = made("eager")
    (row,) = report.to_dict()["routing"]
    assert (row["counted"], row["drawn"]) == (9, 9)
    flat = " ".join(str(report).split())
    assert "8.82 of 16 experts a layer, 1.36 tokens each (expected), of which a loop runs 9" in flat


@with_implementations
def test_another_policy_is_named() -> None:
    (row,) = made(assume={"routing@*.gate": "balanced"}).to_dict()["routing"]
    assert (row["policy"], row["distinct"], row["tokens_each"]) == ("balanced", 12, 1)


def test_a_model_without_experts_has_no_such_section() -> None:
    model = torch.nn.Linear(8, 8)
    report = rt.report(model, torch.empty(4, 8), chip="h200-sxm", phases=("forward",))
    assert "routing" not in report.to_dict()
    assert "routing" not in str(report)


def test_a_decode_step_lists_its_own_choices_and_not_those_of_its_prompt() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=3, num_local_experts=EXPERTS)  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config)
    report = rt.report(model, chip="h200-sxm", phases=("decode",), batch=4, seq=7)
    routing = [a for a in report.to_dict()["assumptions"] if a["kind"] == "routing"]
    assert [a["facts"]["rows"] for a in routing] == [4] * 3  # of 3 layers; the prompt has 28
