"""The cache of a token on one chip of a mesh, by hand."""

from typing import Any

import pytest

import rooftrace as rt
from rooftrace.hardware.systems import load_system
from tests.tracer.expert_models import DEEPSEEK, MIXTRAL, needs_plans, spread_graph

pytestmark = needs_plans
SYSTEM = load_system("dgx-h100")


def cached(config: Any, mesh: Any, phase: str = "prefill") -> float:
    """Bytes of a token of a request on a chip: of prompts of 24 tokens, and of caches of 32."""
    batch, tokens = (2, 24) if phase == "prefill" else (6, 33)
    graph = spread_graph(config, mesh, phase, batch, tokens - (phase == "decode"))
    found = rt.estimate(graph, chip=SYSTEM.joined_chip, execution="serving").memory.kv
    return found / (batch * tokens)


def test_the_cache_of_latents_is_their_closed_form() -> None:
    token = (24 + 8) * 3 * 4  # latents and rotated keys, of 3 layers, in fp32
    assert cached(DEEPSEEK, {"dp": 4, "ep": 4}) == token
    assert cached(DEEPSEEK, {"dp": 16, "ep": 16}, "decode") == token


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1)])
def test_the_cache_of_heads_is_cut_as_the_module_cuts_it(tp: int, heads: int) -> None:
    mesh = {"dp": 2, "tp": tp, "ep": 2 * tp} if tp > 1 else {"dp": 2, "ep": 2}
    assert cached(MIXTRAL, mesh) == heads * 2 * 16 * 2 * 4  # keys and values, 2 layers, fp32
