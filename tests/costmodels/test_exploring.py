"""Least batches with experts on several devices, beside a loop that serves tokens one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rooftrace.errors import RequestError
from rooftrace.studies.explaining import DecodeStep, Rates, RoutedExperts, explore

pytestmark = pytest.mark.quick

# DeepSeek-V3: hidden size, heads, ranks of queries and of the cache, widths of a head, experts.
H, HEADS, R_Q, R_KV, NOPE, ROPE, VALUE = 7168, 128, 1536, 512, 128, 64, 128
LAYERS, MOE, DENSE, EXPERTS, WIDTH, VOCABULARY = 61, 58, 18432, 256, 2048, 129280
PROJECTIONS = (
    H * (R_Q + R_KV + ROPE + HEADS * VALUE)
    + R_Q * HEADS * (NOPE + ROPE)
    + R_KV * HEADS * (NOPE + VALUE)
)
SHARED = MOE * (H * EXPERTS + 3 * H * WIDTH) + 3 * 3 * H * DENSE + H * VOCABULARY
ROUTED = RoutedExperts(layers=MOE, experts=EXPERTS, top_k=8, hidden=H, width=WIDTH)
H200 = Rates(peak=1979e12, memory=4.8e12, link=900e9)


def deepseek(latents: bool) -> DecodeStep:
    """A step in fp8 with the latent cache; on latents, or on keys and values of each head."""
    each = 2 * R_KV + ROPE if latents else NOPE + ROPE + VALUE
    return DecodeStep(
        flops=lambda batch, kv: batch * 2 * (LAYERS * (PROJECTIONS + HEADS * kv * each) + SHARED),
        kv_bytes=lambda batch, kv: batch * LAYERS * (kv + 1) * (R_KV + ROPE),
        weight_bytes=LAYERS * PROJECTIONS + SHARED,
    )


@pytest.mark.parametrize(
    ("latents", "expected"),
    [(False, [256, 256, 2048, None]), (True, [128, 128, 128, 128])],
)
def test_deepseek_on_64_devices_needs_the_batches_that_a_second_program_gives(
    latents: bool, expected: list[int | None]
) -> None:
    cells = explore(deepseek(latents), ROUTED, H200, devices=[64], kv=[2048, 4096, 8192, 16384])
    assert [cell.batch for cell in cells] == expected
    if not latents:
        assert cells[0].flop_per_link_byte == pytest.approx(12_752, rel=5e-4)
        assert cells[-1].limiter == "HBM (KV)"


def test_work_for_each_token_does_not_depend_on_how_many_devices_share_the_experts() -> None:
    cells = explore(deepseek(True), ROUTED, H200, devices=[1, 2, 8, 64], kv=[4096])
    assert len({cell.flop_per_kv_byte for cell in cells}) == 1
    assert [cell.flop_per_link_byte for cell in cells[:1]] == [math.inf]
    # Half of the tokens stay at home on two devices, 1/64 on 64.
    two, many = cells[1].flop_per_link_byte, cells[3].flop_per_link_byte
    assert two / many == pytest.approx((63 / 64) / (1 / 2))


def test_a_slow_link_is_the_limit_for_any_batch() -> None:
    slow = Rates(H200.peak, H200.memory, link=50e9)
    (cell,) = explore(deepseek(True), ROUTED, slow, devices=[64], kv=[2048])
    assert (cell.batch, cell.limiter) == (None, "network")
    assert cell.t_net > cell.t_comp


def test_where_only_the_weights_stand_in_the_way_the_limit_is_hbm() -> None:
    cells = explore(deepseek(True), ROUTED, H200, devices=[1], kv=[2048], batches=[1, 64])
    assert [(cell.batch, cell.limiter) for cell in cells] == [(None, "HBM")]


def by_hand(
    batch: int, kv: int, devices: int, routed: RoutedExperts, rates: Rates
) -> tuple[float, float, float]:
    """Seconds of the busiest device: layer by layer, expert by expert, with plain numbers."""
    flop, moved, sent = 7.0 * batch * kv + 11.0 * batch, 3.0 * batch * kv + 500.0, 0.0
    for _ in range(routed.layers):
        on_it = list(range(routed.experts))[::devices] if devices > 1 else range(routed.experts)
        for _expert in on_it:
            chance_of_none = 1.0
            for _token in range(batch * devices):
                chance_of_none *= 1 - routed.top_k / routed.experts
                rows = routed.top_k / routed.experts
                flop += rows * 3 * 2 * routed.hidden * routed.width
            moved += (1 - chance_of_none) * 3 * routed.hidden * routed.width * routed.weight_bytes
        for _token in range(batch):
            for _call in range(routed.top_k):
                elsewhere = 1 - 1 / devices
                sent += elsewhere * routed.hidden * routed.dispatch_bytes
                sent += elsewhere * routed.hidden * routed.combine_bytes
    return flop / rates.peak, moved / rates.memory, sent / rates.link


@given(
    experts=st.integers(1, 6),
    top_k=st.integers(1, 6),
    devices=st.integers(1, 6),
    layers=st.integers(1, 2),
    kv=st.integers(1, 20),
    rates=st.tuples(*[st.floats(0.1, 10)] * 3),
    alpha=st.floats(0.1, 1.2),
)
@settings(max_examples=60)
def test_the_least_batch_is_that_of_a_loop_over_tokens(
    experts: int, top_k: int, devices: int, layers: int, kv: int, rates: Any, alpha: float
) -> None:
    routed = RoutedExperts(layers, experts, min(top_k, experts), 4, 3, 0.5, 1.0, 2.0)
    device, devices = Rates(*rates), min(devices, experts)
    step = DecodeStep(
        flops=lambda batch, kv: 7.0 * batch * kv + 11.0 * batch,
        kv_bytes=lambda batch, kv: 3.0 * batch * kv,
        weight_bytes=500.0,
    )
    batches = (1, 2, 5, 9)
    (cell,) = explore(step, routed, device, devices=[devices], kv=[kv], batches=batches,
                      alpha=alpha)  # fmt: skip
    seconds = {batch: by_hand(batch, kv, devices, routed, device) for batch in batches}
    margins = {b: comp - alpha * max(hbm, net) for b, (comp, hbm, net) in seconds.items()}
    if any(abs(margin) < 1e-9 * seconds[b][0] for b, margin in margins.items()):
        return  # rounding decides
    enough = [batch for batch in batches if margins[batch] >= 0]
    assert cell.batch == (min(enough) if enough else None)
    shown = seconds[cell.batch or batches[-1]]
    assert (cell.t_comp, cell.t_hbm, cell.t_net) == pytest.approx(shown)
    if cell.batch:
        slowest = max(range(3), key=lambda place: shown[place])
        assert cell.limiter == ("compute", "HBM", "network")[slowest]


def test_a_row_names_its_columns() -> None:
    (cell,) = explore(deepseek(True), ROUTED, H200, devices=[2], kv=[2048])
    assert list(cell.to_row())[:5] == [
        "devices", "kv", "flop_per_kv_byte", "flop_per_link_byte", "batch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"devices": [0]}, "devices=[0]: expected whole numbers of at least 1"),
        ({"kv": []}, "kv=[]"),
        ({"batches": [1.5]}, "batches=[1.5]"),
        ({"devices": [512]}, "256 experts are on that many devices at most"),
        ({"alpha": 0}, "alpha=0: expected a number above 0"),
    ],
)
def test_sizes_that_no_step_has_are_told(changes: dict[str, Any], told: str) -> None:
    sizes: dict[str, Any] = {"devices": [1], "kv": [1], **changes}
    with pytest.raises(RequestError) as error:
        explore(deepseek(True), ROUTED, H200, **sizes)
    assert told in str(error.value)


def test_records_check_themselves() -> None:
    with pytest.raises(RequestError, match="link=0: expected a number above 0"):
        Rates(1, 1, 0)
    with pytest.raises(RequestError, match="top_k=8 of experts=4"):
        RoutedExperts(1, 4, 8, 1, 1)
    with pytest.raises(RequestError, match="weight_bytes=-1"):
        DecodeStep(lambda batch, kv: batch, lambda batch, kv: batch, -1)
    for flops in (lambda batch, kv: -batch, lambda batch, kv: np.ones(2)):
        step = DecodeStep(flops, lambda batch, kv: batch, 1)
        with pytest.raises(RequestError, match="flops gave"):
            explore(step, ROUTED, H200, devices=[1], kv=[1])
