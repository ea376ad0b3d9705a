"""Caches in place, dead code, and other precisions: bytes by hand."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import Access
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.rewrites import (
    append_in_place,
    check_precisions,
    reprice,
    rewrite,
    without_dead_ops,
)
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Ref
from rooftrace.hardware.precisions import PrecisionError
from rooftrace.studies.advice import Study, Variant
from tests.costmodels.graph_support import Builder

pytestmark = pytest.mark.quick

BF16, FP32 = 2, 4  # bytes


# -- what an execution model asks for --------------------------------------------------------------


@pytest.mark.parametrize("execution", ["efficient", "naive", "serving"])
@pytest.mark.parametrize(
    ("name", "phase"), [("llama", "decode"), ("deepseek", "prefill"), ("resnet", "training")]
)
def test_ops_that_a_rewrite_leaves_keep_the_prices_that_they_would_get_anew(
    name, phase, execution, traced
):
    step = rt.estimate(traced(name, phase), "h200-sxm", execution=execution)
    assert step.plan.op_costs == price_ops(step.plan.graph)[0]
    variant = Variant(precisions={"weights_dtype": "fp8"}, execution=step.execution)
    other, _ = Study(step).planned(variant)
    assert other.op_costs == price_ops(other.graph)[0]
    assert other.coverage == plan(other.source, other.execution).coverage


def test_notes_say_what_was_changed(traced):
    graph = traced("llama", "decode")
    naive, notes = rewrite(graph, rt.tools.execution_model("naive"))
    assert notes == ("2 attention calls run as matrix products with the score matrix in HBM",)
    assert not any("attention" in op.target for op in naive.ops)
    _, notes = rewrite(graph, rt.tools.execution_model("efficient"))
    assert notes == ("4 cache appends write the new rows only, into a cache that has room",)
    assert rewrite(graph, rt.tools.execution_model("eager")) == (graph, ())


def test_a_note_about_one_thing_is_in_the_singular():
    b = Builder()
    x = b.input(4, 4)
    b.unary("sin", x)
    _, notes = rewrite(b.graph(b.unary("exp", x)), rt.tools.execution_model("efficient"))
    assert notes == ("1 op disappears because nothing uses the result, as in a compiler",)


# -- caches ----------------------------------------------------------------------------------------

CACHED, WIDTH = 9, 8


def appended() -> tuple[Builder, int, int, int]:
    """A cache [9, 8] with one row put to it, and a product that reads what comes out."""
    b = Builder()
    old = b.input(CACHED, WIDTH, role="kv")
    row = b.input(1, WIDTH)
    out = b.value((CACHED + 1, WIDTH), "kv")
    b.op("aten.cat", {"tensors": (Ref(old), Ref(row)), "dim": 0}, [out])
    b.mm(out, b.weight(WIDTH, WIDTH))
    return b, old, row, out


def test_an_append_as_run_copies_the_cache_and_in_place_writes_a_row():
    b, old, row, out = appended()
    graph = b.graph(out, len(b.values) - 1)
    as_run = price_ops(graph)[0][0]
    assert as_run.bytes() == BF16 * WIDTH * ((CACHED + 1) + (CACHED + 1))
    changed, count = append_in_place(graph)
    in_place = price_ops(changed)[0][0]
    assert count == 1
    assert in_place.traffic == {
        Access(row, False): BF16 * WIDTH, Access(old, True): BF16 * WIDTH
    }  # fmt: skip


def test_what_an_append_makes_is_the_cache():
    b, old, _, out = appended()
    changed, _ = append_in_place(b.graph(out, len(b.values) - 1))
    product = price_ops(changed)[0][1]
    assert changed.values[out].storage == old
    assert product.traffic[Access(old, False)] == BF16 * WIDTH * (CACHED + 1)


def test_appending_twice_keeps_one_cache():
    b, old, row, out = appended()
    last = b.value((CACHED + 2, WIDTH), "kv")
    b.op("aten.cat", {"tensors": (Ref(out), Ref(row)), "dim": 0}, [last])
    changed, count = append_in_place(b.graph(last))
    assert count == 2
    assert {changed.values[i].storage for i in (old, out, last)} == {old}


def test_one_cache_cannot_grow_in_two_ways():
    b, old, row, out = appended()
    other = b.value((CACHED + 1, WIDTH), "kv")
    b.op("aten.cat", {"tensors": (Ref(old), Ref(row)), "dim": 0}, [other])
    changed, count = append_in_place(b.graph(out, other))
    assert count == 1 and changed.values[other].storage == other


def test_the_first_rows_of_an_empty_cache_are_left():
    b = Builder()
    empty, rows = b.input(0, WIDTH, role="kv"), b.input(CACHED, WIDTH)
    out = b.value((CACHED, WIDTH), "kv")
    b.op("aten.cat", {"tensors": (Ref(empty), Ref(rows)), "dim": 0}, [out])
    graph = b.graph(out)
    assert append_in_place(graph) == (graph, 0)


def test_a_prefill_has_nothing_to_append_to(traced):
    graph = traced("llama", "prefill")
    assert append_in_place(graph) == (graph, 0)


# -- dead code -------------------------------------------------------------------------------------


def test_what_nobody_uses_goes_and_what_lives_on_stays():
    b = Builder()
    x, state = b.input(4, 4), b.weight(4, 4)
    y = b.unary("exp", x)
    b.unary("sin", b.unary("cos", x))  # unused, one after the other
    b.in_place("relu_", state)  # the caller sees it
    b.in_place("relu_", y)  # the result, and
    b.in_place("exp_", b.unary("sqrt", x))  # nobody's
    b.item(b.sum(x))  # the host waits for it
    smaller, count = without_dead_ops(b.graph(y))
    left = [op.name.removeprefix("aten.") for op in smaller.ops]
    assert left == ["exp", "relu_", "relu_", "sum", "_local_scalar_dense"]
    assert count == 4


def test_nothing_dead_leaves_the_graph_itself():
    b = Builder()
    graph = b.graph(b.unary("exp", b.input(4, 4)))
    assert without_dead_ops(graph) == (graph, 0)


def test_dead_ops_leave_no_bytes_behind():
    b = Builder()
    x = b.input(64, 64)
    y = b.unary("exp", x)
    z = b.unary("relu", y)
    b.in_place("sin_", y)  # after the last reader
    efficient = plan(b.graph(z), "efficient")
    assert efficient.total.bytes() == BF16 * 2 * 64 * 64  # x in, z out


# -- precisions ------------------------------------------------------------------------------------


def small(own: str = "bf16", **model: object) -> tuple[Builder, OpGraph]:
    """y = x w + cache, with an fp32 norm and an integer beside."""
    b = Builder(own)
    x, w, cache = b.input(4, 8), b.weight(8, 16), b.input(4, 16, role="kv")
    y = b.binary("add", b.mm(x, w), cache)
    island = b.value((4, 16), dtype="fp16" if own != "fp16" else "bf16")
    b.op("aten._to_copy", {"self": Ref(y), "dtype": "dtype:other"}, [island])
    b.input(3, dtype="int64")
    return b, b.graph(y, island, model={"dtype": own, "bytes_parameters": 1000, **model})


@pytest.mark.parametrize(
    "name, bits", [("fp8", 8), ("int4", 4), ("nvfp4", 4.5), ("mxfp8", 8.25), ("fp32", 32)]
)
def test_bytes_of_weights_in_other_precisions(name, bits):
    _, graph = small()
    product = price_ops(reprice(graph, weights_dtype=name))[0][0]
    assert product.traffic[Access(1, False)] == 8 * 16 * bits / 8
    assert product.traffic[Access(0, False)] == BF16 * 4 * 8


def test_weights_alone_leave_the_compute_precision_to_the_activations():
    _, graph = small()
    for name in ("int4", "nvfp4", "fp8"):
        (work,) = price_ops(reprice(graph, weights_dtype=name))[0][0].work
        assert work.precision == "bf16"
    (work,) = price_ops(reprice(graph, dtype="fp8"))[0][0].work
    assert work.precision == "fp8"


def test_the_cache_alone():
    _, graph = small()
    priced = reprice(graph, kv_dtype="fp8")
    assert [t.dtype for t in priced.values if t.role == "kv"] == ["fp8"]
    assert {t.dtype for t in priced.values if t.role == "weights"} == {"bf16"}


def test_islands_and_integers_stay_and_are_counted():
    _, graph = small()
    priced = reprice(graph, dtype="fp8", kv_dtype="bf16")
    assert [t.dtype for t in priced.values] == [
        "fp8", "fp8", "bf16", "fp8", "fp8", "fp16", "int64"
    ]  # fmt: skip
    assert priced.model["islands"] == {"fp16": 1}


def test_bytes_of_parameters_follow_the_weights():
    _, graph = small()
    for options in ({"dtype": "fp8"}, {"weights_dtype": "fp8"}):
        assert reprice(graph, **options).model["bytes_parameters"] == 500
    assert reprice(graph, kv_dtype="fp8").model["bytes_parameters"] == 1000
    assert rt.memory(reprice(graph, weights_dtype="fp8")).weights == 500


def test_pricing_twice_is_pricing_once():
    _, graph = small()
    twice = reprice(reprice(graph, dtype="fp8"), kv_dtype="bf16", weights_dtype="int4")
    once = reprice(graph, dtype="fp8", kv_dtype="bf16", weights_dtype="int4")
    assert twice.values == once.values
    assert [t.dtype for t in twice.values][:3] == ["fp8", "int4", "bf16"]
    assert twice.workload == once.workload


def test_a_declared_weight_precision_holds_until_another_is_asked_for():
    _, graph = small()
    weight = 1
    values = list(graph.values)
    values[weight] = replace(values[weight], stored="int4_g64")
    size = values[weight].elements * 9 // 16  # 4 bits, and 16 for each 64: 17/32 of a byte
    declared = graph.replace(values=tuple(values), model={**graph.model, "bytes_stored": size})
    assert reprice(declared).values[weight].dtype == "int4_g64"
    assert reprice(declared).model["bytes_parameters"] == size
    assert reprice(declared, kv_dtype="fp8").values[weight].dtype == "int4_g64"
    assert reprice(declared, weights_dtype="int4").values[weight].dtype == "int4"
    assert reprice(declared, dtype="fp16").values[weight].dtype == "fp16"
    again = reprice(reprice(declared, dtype="fp16"), kv_dtype="fp8")
    assert again.values[weight].dtype == "fp16"


def test_nothing_asked_is_the_graph_itself():
    _, graph = small()
    assert reprice(graph) is graph


@pytest.mark.parametrize(
    "names", [("int8",), ("int64",), ("bool",), (None, "int32"), (None, "bool"), ("fp9",)]
)
def test_precisions_that_values_cannot_have(names):
    with pytest.raises(PrecisionError, match="precision"):
        check_precisions(*names)


def test_precisions_that_values_can_have():
    check_precisions("fp8", "int4", "uint8")
    check_precisions(None, None, "nvfp4")


class Mlp(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def dtypes(graph: OpGraph, role: str) -> set[str]:
    return {t.dtype for t in graph.values if t.role == role}


def test_a_model_priced_lower_keeps_the_optimizers_fp32():
    graph = rt.trace(Mlp(), torch.empty(4, 8), phase="training", dtype="bf16")
    priced = reprice(graph, dtype="bf16")
    assert dtypes(priced, "weights") == {"bf16"} and dtypes(priced, "optimizer") == {"fp32"}
    made = {i for op in priced.ops if op.part == "optimizer" for i in op.outputs}
    backward = {i for op in priced.ops if op.part == "backward" for i in op.outputs}
    gradients = [i for i, t in enumerate(priced.values) if t.role == "gradients"]
    assert {priced.values[i].dtype for i in gradients if i in backward} == {"bf16"}
    # The optimizer's own copies of the gradients, its square roots and so on are fp32; what it
    # writes back into the weights is bf16.
    kinds = {(priced.owner(i).role, priced.values[i].dtype) for i in made}
    assert ("weights", "bf16") in kinds
    assert all(dtype == "fp32" for role, dtype in kinds if role != "weights")


def test_gradients_that_the_optimizer_copies_stay_fp32():
    b = Builder("fp32")
    x, w, master = b.input(4, 8), b.weight(8, 8), b.input(8, 8, role="optimizer")
    gradient = b.value((4, 8), "gradients")
    b.op("aten.mm", {"self": Ref(x), "mat2": Ref(w)}, [gradient], part="backward")
    copy = b.value((4, 8), "gradients")
    b.op("aten._to_copy", {"self": Ref(gradient)}, [copy], part="optimizer")
    halved = b.value(b.places[gradient], like=gradient)
    b.op("aten.mul_", {"self": Ref(gradient)}, [halved], part="optimizer")
    priced = reprice(b.graph(model={"dtype": "fp32"}), dtype="bf16")
    named = {"gradient": gradient, "copy": copy, "halved": halved, "master": master}
    assert {name: priced.values[i].dtype for name, i in named.items()} == {
        "gradient": "bf16", "copy": "fp32", "halved": "bf16", "master": "fp32"
    }  # fmt: skip


def test_backward_is_not_dead_without_an_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    graph = rt.trace(model, torch.empty(2, 8), phase="training", optimizer="none")
    eager, compiled = (rt.estimate(graph, execution=e) for e in ("eager", "compiled"))
    assert compiled.flops_matrix == eager.flops_matrix > 0
    gradients = {i for i, t in enumerate(graph.values) if t.role == "gradients" and t.name}
    assert len(gradients) == 4, "two weights and two biases"
    assert {graph.values[i].storage for i in graph.outputs} >= gradients


class Upcasting(nn.Module):
    """Attention as older models write it: queries and keys multiplied in fp32."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query.float() @ key.float().transpose(-1, -2) / 8
        return torch.softmax(scores, -1).to(value.dtype) @ value


@pytest.mark.parametrize("permuted", [False, True])
def test_a_kernel_of_attention_widens_nothing_in_memory(permuted: bool) -> None:
    q, k, v = (torch.empty(4, 16, n, 64, dtype=torch.bfloat16) for n in (1, 512, 512))
    if permuted:  # heads behind tokens: a product makes a copy in order
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    estimate = rt.estimate(rt.trace(Upcasting(), q, k, v), "h100-sxm")
    (row,) = estimate.rows
    moved = 2 * (2 * 4 * 16 * 64 + 2 * 4 * 16 * 512 * 64)  # query and result, keys and values
    assert row.name == "flash attention"
    assert moved <= row.bytes < 1.02 * moved  # and the sums that backward would read
