"""Pricing a graph: equal ops once, each bound to its own storages; gaps have bounds."""

import pytest

from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops import opview
from rooftrace.costmodels.ops.cost import Access, Cost, Work
from rooftrace.costmodels.ops.opview import OpView
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.graph.records import Ref
from tests.costmodels.graph_support import Builder

pytestmark = pytest.mark.quick

BF16 = 2  # bytes


def test_equal_ops_cost_the_same_on_their_own_storages():
    b = Builder()
    w = b.weight(8, 8)
    first, second = b.input(4, 8), b.input(4, 8)
    outs = [b.mm(x, w) for x in (first, second)]
    costs, known = price_ops(b.graph(*outs))
    assert (
        costs[0].work
        == costs[1].work
        == {Work("matmul", "bf16", 4, columns=8, inner=8, lined="NK"): 2 * 4 * 8 * 8}
    )
    assert costs[0].traffic == {
        Access(first, False): BF16 * 32, Access(w, False): BF16 * 64,
        Access(outs[0], True): BF16 * 32,
    }  # fmt: skip
    assert costs[1].traffic.keys() == {
        Access(second, False), Access(w, False), Access(outs[1], True)
    }  # fmt: skip
    assert known == (True, True)


def test_ops_that_differ_in_sharing_do_not_cost_the_same():
    b = Builder()
    x, y = b.input(4, 8), b.input(4, 8)
    outs = [b.binary("mul", x, y), b.binary("mul", x, x)]
    costs, _ = price_ops(b.graph(*outs))
    assert [cost.bytes() for cost in costs] == [BF16 * 3 * 32, BF16 * 2 * 32]


def test_arguments_that_are_equal_but_of_other_types_are_kept_apart(monkeypatch):
    b = Builder()
    x = b.input(4, 8)
    outs = []
    for value in (1, 1.0, True):
        outs.append(b.value((4, 8)))
        b.op("tests.power", {"self": Ref(x), "exponent": value}, [outs[-1]])
    seen = []

    def record(op: OpView) -> Cost:
        seen.append(op.attribute("exponent"))
        return Cost()

    rule = opview.Rule(name="tests.power", price=record, fusion="opaque")
    monkeypatch.setitem(opview.RULES, "tests.power", rule)
    price_ops(b.graph(*outs))
    assert [type(value) for value in seen] == [int, float, bool]


def test_an_op_without_a_rule_carries_the_bytes_of_its_tensors():
    b = Builder()
    x, y = b.input(4, 8), b.input(8)
    out = b.value((4, 4))
    b.op("nobody.knows", {"x": Ref(x), "ys": (Ref(y), Ref(y))}, [out])
    (cost,), known = price_ops(b.graph(out))
    assert known == (False,)
    assert not cost.work and cost.bytes() == BF16 * (32 + 8 + 16)


def test_views_and_waits_cost_nothing():
    b = Builder()
    x = b.input(1, 1)
    b.view(x, b.places[x].T)
    b.item(x)
    costs, known = price_ops(b.graph())
    assert costs == (Cost(), Cost()) and known == (True, True)


def test_what_runs_again_in_backward_is_recomputation():
    b = Builder()
    x, w = b.input(4, 8), b.weight(8, 8)
    out = b.mm(x, w, part="recompute")
    (cost,), _ = price_ops(b.graph(out))
    assert cost.flops() == 0
    assert cost.flops(counts=("recompute",)) == 2 * 4 * 8 * 8
    assert cost.bytes() == BF16 * (32 + 64 + 32)


def test_a_kernel_that_skips_masked_pairs_skips_them_again():
    cost = Cost.of(matmul=6, precision="bf16", rows=2)
    cost += Cost.of(matmul=4, precision="bf16", rows=2, count="masked")
    cost += Cost.of(matmul=1, precision="bf16", rows=2, count="masked_executed")
    assert cost.recomputed().work == {Work("matmul", "bf16", 2, "recompute"): 6 + 1}


def test_products_of_materialised_attention_say_which_pairs_the_mask_shows():
    b = Builder()
    q, k = b.input(2, 4, 8), b.input(2, 8, 4)
    out = b.value((2, 4, 4))
    b.op("aten.bmm", {"self": Ref(q), "mat2": Ref(k)}, [out],
         facts={"useful_pairs": 10, "all_pairs": 16})  # fmt: skip
    (cost,), _ = price_ops(b.graph(out))
    assert cost.flops() == 2 * 2 * 4 * 4 * 8  # dense
    assert cost.flops(counts=("useful",)) == 2 * 2 * 10 * 8
    assert cost.flops(counts=("masked_executed",)) == 2 * 2 * 6 * 8


def test_a_store_into_a_cache_is_bounded_from_both_sides():
    """4 rows of 4 KiB into a cache of 64 MiB, without a rule."""
    b = Builder("bf16")
    cache, new = b.input(8192, 2048, role="kv"), b.input(4, 2048)
    wide = b.value(b.places[cache], like=cache)
    b.op("mylib.store_", {"cache": Ref(cache), "new": Ref(new)}, [wide])
    graph = b.graph(wide)
    whole, rows = 2 * 8192 * 2048, 2 * 4 * 2048
    (entry,) = plan(graph, "eager").coverage.unsupported
    assert plan(graph, "eager").total.bytes() == entry.bytes == rows + rows  # read, write as much
    assert entry.bytes_least == 0  # what is new is not known to be read
    assert entry.bytes_most == rows + whole + whole  # both read, the cache written


def test_what_the_step_made_itself_is_updated_whole():
    b = Builder("bf16")
    x = b.unary("relu", b.input(64, 64))
    table = b.input(4, 8)
    turned = b.value(b.places[x], like=x)
    b.op("mylib.rotate_", {"x": Ref(x), "table": Ref(table)}, [turned])
    graph = b.graph(turned)
    (entry,) = plan(graph, "eager").coverage.unsupported
    assert entry.bytes == entry.bytes_most == 2 * (64 * 64 + 64 * 64 + 4 * 8)  # read, write, read


def test_an_op_that_returns_and_writes_beside_has_both():
    b = Builder("bf16")
    cache, new = b.input(1024, 64, role="kv"), b.input(4, 64)
    out = b.value((4, 64))
    facts = {"writes": ("cache",)}
    b.op("mylib.attend", {"cache": Ref(cache), "new": Ref(new)}, [out], facts=facts)
    (entry,) = plan(b.graph(out), "eager").coverage.unsupported
    assert entry.bytes_least == 2 * 4 * 64  # the result
    assert entry.bytes_most == 2 * (1024 * 64 * 2 + 4 * 64 + 4 * 64)
    assert entry.bytes_least <= entry.bytes <= entry.bytes_most
