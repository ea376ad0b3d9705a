"""Prefill and decode on chips of their own: the cache between them and the balance, by hand."""

from typing import Any

import pytest

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import load_system
from tests.tracer.expert_models import DEEPSEEK, MIXTRAL, needs_plans, spread_graph

pytestmark = needs_plans
SYSTEM = load_system("dgx-h100")


def estimated(config: Any, mesh: Any, phase: str, batch: int, seq: int) -> Any:
    graph = spread_graph(config, mesh, phase, batch, seq)
    return rt.estimate(graph, chip=SYSTEM.joined_chip, execution="serving")


def both(config: Any, mesh: Any, then: Any, output: int = 5) -> tuple[Any, Any, Any]:
    prefill = estimated(config, mesh, "prefill", 2, 24)
    decode = estimated(config, then, "decode", 6, 32)
    return prefill, decode, rt.tools.disaggregated(prefill, decode, output=output)


def test_the_cache_of_latents_is_their_closed_form() -> None:
    _, _, result = both(DEEPSEEK, {"dp": 4, "ep": 4}, {"dp": 16, "ep": 16})
    token = (24 + 8) * 3 * 4  # latents and rotated keys, of 3 layers, in fp32
    assert result.prefill.kv_bytes_per_token == token
    assert result.decode.kv_bytes_per_token == token
    assert result.kv_bytes == 24 * token  # of the prompt
    assert result.transfer == pytest.approx(24 * token / 50e9)  # a card of 400 Gbit/s


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1)])
def test_the_cache_of_heads_is_cut_as_the_module_cuts_it(tp: int, heads: int) -> None:
    mesh = {"dp": 2, "tp": tp, "ep": 2 * tp} if tp > 1 else {"dp": 2, "ep": 2}
    _, _, result = both(MIXTRAL, mesh, {"dp": 8, "ep": 8})
    token = 2 * 16 * 2 * 4  # keys and values of one head, 2 layers, fp32
    assert result.prefill.kv_bytes_per_token == heads * token
    assert result.decode.kv_bytes_per_token == 2 * token
    assert result.kv_bytes == 24 * 2 * token  # a chip of decode receives both heads


def test_in_balance_neither_waits_for_the_other() -> None:
    prefill, decode, result = both(MIXTRAL, {"dp": 4, "ep": 4}, {"dp": 8, "ep": 8}, output=7)
    decoding = 1000.0  # chips
    prefilling = decoding * result.prefill_per_decode
    arriving = prefilling / 4 * (4 * 2) / prefill.t_est  # requests per second of batches of 2
    leaving = decoding / 8 * (8 * 6) / (7 * decode.t_est)
    assert arriving == pytest.approx(leaving)
    tokens = leaving * 7 / (prefilling + decoding)
    assert result.output_tokens_per_s_per_chip == pytest.approx(tokens)
    assert result.first_token == prefill.t_est + result.transfer
    shown = str(result)
    assert "24 tokens in, 7 out" in shown
    assert "assumed: each of 7 tokens of an answer takes the step of decode" in shown


def test_what_is_no_pair_is_refused_in_a_line() -> None:
    prefill, decode, _ = both(MIXTRAL, {"dp": 4, "ep": 4}, {"dp": 8, "ep": 8})
    with pytest.raises(RequestError, match="an estimate of decode: expected one of prefill"):
        rt.tools.disaggregated(decode, prefill, output=3)
    with pytest.raises(RequestError, match="output=0: expected a whole number"):
        rt.tools.disaggregated(prefill, decode, output=0)
    alone = rt.estimate(prefill.graph, chip="h100-sxm", execution="serving")
    with pytest.raises(RequestError, match="no network between prefill and decode"):
        rt.tools.disaggregated(alone, decode, output=3)
