"""Seconds of collectives: against published measurements, and what must hold for any of them."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from rooftrace.costmodels.timing import (
    collective_seconds,
    expert_exchange_seconds,
    link_seconds,
    per_rank_link_bytes,
)
from rooftrace.hardware import load_chip
from rooftrace.hardware.systems import System, load_system
from rooftrace.hardware.systems.records import COLLECTIVES, SystemSizeError

pytestmark = pytest.mark.quick

H100, B200, A100 = (load_system(name) for name in ("dgx-h100", "dgx-b200", "dgx-a100"))
L40S, NVL72 = load_system("l40s-pcie"), load_system("gb200-nvl72")
KINDS = sorted(COLLECTIVES)
SYSTEMS = (H100, B200, A100, L40S, load_system("hgx-h100-4nic"), load_system("dgx-h200"))

# Medians over versions of NCCL in aiconfigurator's performance database (commit 095f58a): op,
# ranks, bytes, microseconds.
PUBLISHED = [
    (H100, "all_reduce", 2, 1 << 10, 6.1),
    (H100, "all_reduce", 8, 1 << 10, 15.6),
    (H100, "all_reduce", 8, 1 << 20, 25.4),
    (H100, "all_reduce", 8, 1 << 24, 122.1),
    (H100, "all_reduce", 8, 1 << 28, 1091.1),
    (H100, "all_gather", 8, 1 << 16, 13.1),
    (H100, "all_gather", 8, 1 << 26, 209.3),
    (H100, "reduce_scatter", 4, 1 << 28, 678.4),
    (H100, "all_to_all", 8, 1 << 28, 763.9),
    (A100, "all_reduce", 8, 1 << 10, 21.8),
    (A100, "all_reduce", 8, 1 << 26, 595.3),
    (L40S, "all_reduce", 2, 1 << 28, 13373.0),
    (L40S, "all_reduce", 4, 1 << 28, 78355.0),
    (L40S, "all_gather", 4, 1 << 26, 10622.0),
]


@pytest.mark.parametrize(("system", "op", "ranks", "nbytes", "microseconds"), PUBLISHED)
def test_published_measurements_are_met(
    system: System, op: str, ranks: int, nbytes: int, microseconds: float
) -> None:
    taken = collective_seconds(system, op, nbytes, range(ranks))
    assert taken.seconds * 1e6 == pytest.approx(microseconds, rel=0.25)
    assert taken.beyond == ""


def test_a_serving_library_is_faster_for_small_buffers_only() -> None:
    small = {library: seconds("all_reduce", 8 << 10, range(8), library) for library in LIBRARIES}
    assert max(small["vllm"], small["trtllm"]) < 0.5 * small["nccl"]
    assert small["custom"] == small["vllm"]
    large = {library: seconds("all_reduce", 1 << 28, range(8), library) for library in LIBRARIES}
    assert large["vllm"] == pytest.approx(large["nccl"], rel=0.3)  # they call NCCL then


LIBRARIES = ("nccl", "vllm", "trtllm", "custom")


def seconds(op: str, nbytes: float, ranks: Sequence[int], library: str = "nccl") -> float:
    return collective_seconds(H100, op, nbytes, ranks, library).seconds


def test_a_group_across_nodes_is_limited_by_the_cards_it_has() -> None:
    whole = 1 << 30
    for chips, cards in ((range(16), 8), ((0, 8), 1)):
        taken = collective_seconds(H100, "all_gather", whole, chips)
        assert taken.level == "network"
        assert taken.seconds > whole / 2 / (cards * 50e9)  # half of it comes from the other node
    one, all_of_them = seconds("all_reduce", whole, (0, 8)), seconds("all_reduce", whole, range(16))
    assert one > 4 * all_of_them  # eight cards share the work


def test_half_as_many_cards_take_longer_for_chips_that_share_them() -> None:
    shared = load_system("hgx-h100-4nic")
    one = collective_seconds(shared, "all_reduce", 1 << 30, (0, 8)).seconds
    assert one == pytest.approx(2 * seconds("all_reduce", 1 << 30, (0, 8)), rel=0.02)


def test_a_bus_that_all_share_gets_slower_with_every_card() -> None:
    taken = [collective_seconds(L40S, "all_gather", 1 << 26, range(n)).seconds for n in (2, 4, 8)]
    assert taken[1] > 4 * taken[0] and taken[2] > 3 * taken[1]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_group_of_one_takes_no_time(kind: str) -> None:
    assert collective_seconds(H100, kind, 1 << 20, [3]).seconds == 0
    assert link_seconds(H100, kind, 1 << 20, [3]) == 0
    assert per_rank_link_bytes(kind, 1 << 20, 1) == 0
    assert expert_exchange_seconds(H100, 64, 7168, 8, [3]).seconds == 0


groups = st.sampled_from(
    [range(2), range(4), range(8), range(2, 6), (0, 1), (1, 5), (0, 2, 4, 6), (3, 7)]
)
wide = st.sampled_from([range(16), range(32), range(64), (0, 8), (0, 8, 16, 24), range(4, 12)])
sizes = st.integers(0, 1 << 34)


@given(st.sampled_from(SYSTEMS), st.sampled_from(KINDS), groups, sizes, sizes)
def test_more_bytes_never_take_less(
    system: System, kind: str, group: Sequence[int], small: int, large: int
) -> None:
    small, large = sorted((small, large))
    less = collective_seconds(system, kind, small, group).seconds
    assert 0 < less <= collective_seconds(system, kind, large, group).seconds


@given(st.sampled_from((H100, B200, A100)), st.sampled_from(KINDS), groups | wide, sizes)
def test_no_collective_is_faster_than_the_links(
    system: System, kind: str, group: Sequence[int], nbytes: int
) -> None:
    least = link_seconds(system, kind, nbytes, group)
    assert 0 <= least <= collective_seconds(system, kind, nbytes, group).seconds


@given(st.sampled_from((H100, B200, A100)), st.sampled_from(KINDS), sizes)
def test_a_second_node_never_helps(system: System, kind: str, nbytes: int) -> None:
    inner = collective_seconds(system, kind, nbytes, range(8))
    outer = collective_seconds(system, kind, nbytes, range(16))
    if kind not in ("send", "recv", "all_to_all", "gather", "scatter"):  # these send less inside
        assert outer.seconds >= inner.seconds
    assert outer.level == "network"
    apart = collective_seconds(system, kind, nbytes, range(4, 12))
    assert apart.level == "network"


@given(st.sampled_from(KINDS), st.integers(1, 5), sizes)
def test_more_nodes_never_take_less(kind: str, nodes: int, nbytes: int) -> None:
    few = seconds(kind, nbytes, range(8 * 2**nodes))
    less_inside = kind in ("all_to_all", "gather", "scatter")  # more of it goes out
    slack = 1.05 if less_inside else 1 + 1e-9
    assert few <= seconds(kind, nbytes, range(8 * 2 ** (nodes + 1))) * slack


@given(st.sampled_from(KINDS), st.integers(2, 9), sizes)
def test_the_numbers_of_a_group_do_not_matter_but_their_places(
    kind: str, node: int, nbytes: int
) -> None:
    moved = [8 * node + rank for rank in range(8)]
    assert seconds(kind, nbytes, moved) == seconds(kind, nbytes, range(8))


def sent_around_a_ring(kind: str, ranks: int) -> int:
    """Pieces that one rank sends, counted hop by hop; the buffer has `ranks` pieces."""
    has = {rank: {rank} for rank in range(ranks)}
    sent = 0
    while any(len(pieces) < ranks for pieces in has.values()):
        before = {rank: set(pieces) for rank, pieces in has.items()}
        for rank in range(ranks):
            has[(rank + 1) % ranks] |= before[rank]
        sent += 1
    return 2 * sent if kind == "all_reduce" else sent


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_sends_what_is_counted_hop_by_hop(kind: str, ranks: int) -> None:
    pieces = sent_around_a_ring(kind, ranks)
    assert per_rank_link_bytes(kind, 1000 * ranks, ranks) == pytest.approx(1000 * pieces)


def test_an_all_to_all_keeps_its_own_part() -> None:
    assert per_rank_link_bytes("all_to_all", 800, 8) == 700
    assert per_rank_link_bytes("all_to_all", 800, range(8)) == 700
    assert per_rank_link_bytes("send", 800, 2) == per_rank_link_bytes("broadcast", 800, 8) == 800


@pytest.mark.parametrize(
    ("system", "op", "nbytes", "ranks", "said"),
    [
        (
            NVL72,
            "all_reduce",
            1 << 20,
            range(16),
            "16 ranks; measured up to 4",
        ),
        (H100, "all_reduce", 1 << 29, range(8), "512.0 MiB; measured up to 256.0 MiB"),
        (H100, "all_gather", 1 << 20, range(16), "all_gather over network not measured"),
        (H100, "broadcast", 1 << 20, range(8), "broadcast not measured: constants of all_gather"),
        (load_system("dgx-h200"), "all_reduce", 1 << 20, range(8), "not measured on dgx-h200"),
        (System.of_chip(load_chip("h100-sxm")), "all_reduce", 1, range(8), "not fitted"),
    ],
)
def test_what_lies_beyond_measurements_is_said(
    system: System, op: str, nbytes: int, ranks: range, said: str
) -> None:
    assert said in collective_seconds(system, op, nbytes, ranks).beyond


def test_a_wrong_word_is_quoted() -> None:
    with pytest.raises(ValueError, match="collective 'allreduce': expected one of all_reduce"):
        collective_seconds(H100, "allreduce", 1, range(2))
    with pytest.raises(ValueError, match="library 'rccl': expected one of nccl"):
        collective_seconds(H100, "all_reduce", 1, range(2), "rccl")
    with pytest.raises(ValueError, match="mode 'fast'"):
        expert_exchange_seconds(H100, 1, 1, 1, range(2), "fast")
    with pytest.raises(SystemSizeError, match="rank 8"):
        collective_seconds(L40S, "all_reduce", 1, range(9))


# Microseconds in aiconfigurator's performance database: DeepEP on H100, hidden size 7168, 8 of 256
# experts.  Mode, way, nodes, tokens, bytes of a token (fp8 there, bf16 back).
EXCHANGED = [
    ("low-latency", "dispatch", 1, 1, 7168, 14.7),
    ("low-latency", "dispatch", 1, 1024, 7168, 230.5),
    ("low-latency", "dispatch", 2, 64, 7168, 58.1),
    ("low-latency", "dispatch", 8, 256, 7168, 301.1),
    ("low-latency", "combine", 1, 256, 14336, 132.8),
    ("low-latency", "combine", 8, 256, 14336, 579.5),
]


@pytest.mark.parametrize(("mode", "way", "nodes", "tokens", "width", "microseconds"), EXCHANGED)
def test_published_exchanges_are_met(
    mode: str, way: str, nodes: int, tokens: int, width: int, microseconds: float
) -> None:
    taken = expert_exchange_seconds(H100, tokens, width, 8, range(8 * nodes), mode, way)
    assert taken.seconds * 1e6 == pytest.approx(microseconds, rel=0.2)
    assert taken.beyond == ""


@given(
    st.sampled_from(["normal", "low-latency"]),
    st.sampled_from(["dispatch", "combine"]),
    st.sampled_from([8, 16, 64]),
    st.integers(1, 4096),
)
def test_more_tokens_and_experts_of_a_token_take_longer(
    mode: str, way: str, ranks: int, tokens: int
) -> None:
    def taken(tokens: int, chosen: int) -> float:
        group = range(ranks)
        return expert_exchange_seconds(H100, tokens, 7168, chosen, group, mode, way).seconds

    assert taken(tokens, 4) <= taken(tokens, 8) <= taken(2 * tokens, 8)
    assert math.isfinite(taken(2 * tokens, 8))


def test_an_exchange_that_was_not_measured_says_so() -> None:
    assert "not fitted" in expert_exchange_seconds(L40S, 64, 4096, 2, range(8)).beyond
    assert (
        "not measured"
        in expert_exchange_seconds(load_system("dgx-h200"), 64, 4096, 2, range(8)).beyond
    )
    assert "measured up to 64" in expert_exchange_seconds(H100, 64, 7168, 8, range(128)).beyond
