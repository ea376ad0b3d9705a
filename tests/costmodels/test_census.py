"""The census: every matrix product of a step by its sizes, its tiles, and what odd sizes waste."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.estimates import Product
from rooftrace.hardware.chipfile import load_chip
from rooftrace.reporting.views.results import as_markdown
from tests.conftest import in_turn
from tests.costmodels.conftest import language_model

H200 = load_chip("h200-sxm")
BF16 = 2  # bytes


class Bilinear(nn.Module):
    """Products of a batch, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        waves = torch.complex(x, x)
        return x @ x.transpose(1, 2) + (waves @ waves.transpose(1, 2)).real


def mixtral() -> nn.Module:
    return language_model(
        "Mixtral", vocab_size=96, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=4, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def gpt2() -> nn.Module:
    return language_model("GPT2", vocab_size=97, n_positions=32, n_embd=32, n_layer=5, n_head=4,
                          bos_token_id=0, eos_token_id=0)  # fmt: skip


TOKENS = torch.zeros(2, 8, dtype=torch.long)
ZOO: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "linear": lambda: (nn.Linear(24, 40), (torch.ones(6, 24),), {}),
    "conv": lambda: (nn.Conv2d(8, 12, 3, padding=1, groups=2), (torch.ones(2, 8, 9, 9),), {}),
    "transposed conv": lambda: (nn.ConvTranspose2d(6, 4, 3, 2), (torch.ones(2, 6, 5, 5),), {}),
    "conv 1d": lambda: (nn.Conv1d(6, 5, 4), (torch.ones(2, 6, 20),), {}),
    "attention": lambda: (
        nn.MultiheadAttention(32, 4, batch_first=True),
        (torch.ones(2, 7, 32),) * 3,
        {},
    ),
    "encoder": lambda: (
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        (torch.ones(2, 7, 32),),
        {},
    ),
    "lstm": lambda: (nn.LSTM(12, 20, 2, bidirectional=True), (torch.ones(5, 3, 12),), {}),
    "gru": lambda: (nn.GRU(20, 20), (torch.ones(5, 3, 20),), {}),
    "batched": lambda: (Bilinear(), (torch.ones(3, 6, 8),), {}),
    "bilinear": lambda: (nn.Bilinear(5, 6, 7), (torch.ones(4, 5), torch.ones(4, 6)), {}),
    "experts": lambda: (mixtral(), (), {"input_ids": TOKENS}),
    "gpt2": lambda: (gpt2(), (), {"input_ids": TOKENS}),
}


def products_of(est: rt.types.Estimate) -> tuple[Product, ...]:
    return est.census().products


@pytest.mark.parametrize(
    ("name", "execution", "phase"),
    in_turn(ZOO, ["naive", "eager", "serving", "efficient"], ["forward", "training", "training"]),
)
def test_products_and_attention_are_the_matrix_flops(name: str, execution: str, phase: str) -> None:
    model, args, kwargs = ZOO[name]()
    graph = rt.trace(model, *args, phase=phase, **kwargs)
    for knobs in ("typical", None):
        est = rt.estimate(graph, H200, rt.tools.execution_model(execution, knobs=knobs))
        census = est.census()
        assert sum(p.flops for p in census.products) + census.flops_attention == est.flops_matrix
        again = sum(p.flops_recompute for p in census.products)
        assert again <= est.flops_recompute
        shares = [s for p in census.products for s in (p.tile_efficiency, p.wave_efficiency)]
        assert all(share is None or 0 < share <= 1 for share in shares)
        assert all((p.seconds_wasted or 0) >= -1e-15 for p in census.products)
        for p in census.products:
            if p.shape is not None and p.batch is not None:
                each = 2 * p.shape[0] * p.shape[1] * p.shape[2]
                assert p.calls * p.batch * each == pytest.approx(p.flops + p.flops_recompute)


@pytest.mark.parametrize("name", ["linear", "conv 1d", "transposed conv", "attention", "gpt2"])
def test_the_census_counts_what_flop_counter_mode_counts(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    with FlopCounterMode(display=False) as counter:
        device = next(model.parameters()).device
        model(*(x.to(device) for x in args), **{k: x.to(device) for k, x in kwargs.items()})
    est = rt.estimate(model, *args, chip=H200, **kwargs)
    assert est.census().flops_matrix == counter.get_total_flops()


def test_the_sizes_of_a_linear_layer_and_of_its_gradients() -> None:
    est = rt.estimate(nn.Linear(24, 40), torch.ones(6, 24, requires_grad=True), phase="training")
    shapes = {p.shape: (p.parts, p.flops) for p in products_of(est)}
    assert shapes == {
        (6, 40, 24): (("forward",), 2 * 6 * 40 * 24),  # y = x W^T
        (40, 24, 6): (("backward",), 2 * 40 * 24 * 6),  # dW = dy^T x
        (6, 24, 40): (("backward",), 2 * 6 * 24 * 40),  # dx = dy W
    }


def test_a_convolution_is_the_product_of_its_windows_written_out() -> None:
    conv, images = nn.Conv2d(8, 12, (3, 5), stride=2, groups=2), torch.ones(3, 8, 20, 30)
    windows = F.unfold(images[:, :4], (3, 5), stride=2)  # one group: [N, C / groups * R S, P]
    (product,) = products_of(rt.estimate(conv, images))
    assert product.operation == "convolution" and product.kind == "conv"
    assert (product.rows, product.inner) == (3 * windows.shape[2], windows.shape[1])
    assert (product.columns, product.batch) == (12 / 2, 2)
    assert product.odd == () and product.aligned is None


def test_an_lstm_has_the_input_of_all_steps_at_once_and_the_state_of_each() -> None:
    est = rt.estimate(nn.LSTM(12, 20), torch.ones(5, 3, 12))
    shapes = {(p.shape, p.batch) for p in products_of(est)}
    assert shapes == {((5 * 3, 4 * 20, 12), 1), ((3, 4 * 20, 20), 5)}
    tiled = [p for p in products_of(est) if p.tile_efficiency is not None]
    assert len(tiled) == 1, "one product of a kernel is timed by tiles; of the other nothing is"


def test_experts_are_products_of_the_rows_that_they_get_on_average() -> None:
    est = rt.estimate(mixtral(), input_ids=TOKENS)
    grouped = [p for p in products_of(est) if p.kind in ("grouped mm", "bmm") and p.batch != 1]
    assert grouped
    for product in grouped:
        assert product.rows is not None and product.batch is not None
        assert product.rows * product.batch == pytest.approx(2 * 8 * 2)  # tokens x top-k
        assert product.batch <= 8


def test_equal_layers_are_one_row_with_all_their_calls() -> None:
    products = products_of(rt.estimate(gpt2(), input_ids=TOKENS, execution="eager"))
    (mlp,) = [p for p in products if p.shape == (16, 128, 32)]
    assert mlp.calls == 5 and mlp.modules == ("transformer.h.*.mlp.c_fc",)
    assert mlp.flops == 5 * 2 * 16 * 128 * 32


def test_seconds_are_those_of_the_kernels() -> None:
    est = rt.estimate(gpt2(), input_ids=TOKENS, execution="eager")
    census = est.census()
    matrix = [row for row in est.rows if row.name in ("addmm", "mm", "aten.addmm", "aten.mm")]
    assert sum(p.seconds for p in census.products) == pytest.approx(
        sum(row.timing.t_device for row in matrix)
    )
    assert census.calls_attention == 5
    assert sum(p.share for p in census.products) == pytest.approx(
        sum(p.seconds for p in census.products) / est.times.t_serial
    )


# -- tiles -----------------------------------------------------------------------------------------


def one_product(rows: int, columns: int, inner: int) -> rt.types.OpGraph:
    with torch.device("meta"):
        model, x = nn.Linear(inner, columns, bias=False), torch.empty(rows, inner)
    return rt.trace(model.bfloat16(), x.bfloat16())


@pytest.mark.parametrize("shape", [(2048, 4096, 1024), (300, 700, 512), (8192, 50257, 768)])
@pytest.mark.parametrize("knobs", ["typical", None])
def test_efficiencies_are_those_of_tiles_counted_one_by_one(
    shape: tuple[int, int, int], knobs: str | None
) -> None:
    rows, columns, inner = shape
    execution = rt.tools.execution_model("eager", knobs=knobs)
    est = rt.estimate(one_product(rows, columns, inner), H200, execution)
    (product,) = products_of(est)
    assert product.tile is not None and product.split is not None
    a, b = product.tile
    assert f"{a} x {b}" in as_markdown(est.census())
    blocks = sum(product.split for _ in range(0, rows, a) for _ in range(0, columns, b))
    assert product.tile_efficiency == rows * columns / (blocks / product.split * a * b)
    waves = len(range(0, blocks, 132))  # SMs of an H200
    assert product.wave_efficiency == pytest.approx(blocks / (waves * 132))


def test_nothing_is_said_of_tiles_where_nothing_is_modelled() -> None:
    unknown = replace(H200, sm_count=None)
    graph = rt.trace(nn.Linear(100, 300), torch.ones(50, 100))
    for knobs in ("typical", None):
        (product,) = products_of(
            rt.estimate(graph, unknown, rt.tools.execution_model("eager", knobs=knobs))
        )
        assert product.tile is product.tile_efficiency is product.wave_efficiency is None
        assert product.seconds_wasted is product.flops_wasted is None


def test_full_tiles_in_full_waves_waste_nothing() -> None:
    exact = rt.tools.execution_model("eager", knobs=None)
    graph = one_product(128 * 16, 128 * 132, 8192)
    (product,) = products_of(rt.estimate(graph, H200, exact))
    assert product.tile_efficiency == product.wave_efficiency == 1
    assert product.flops_wasted == 0
    assert product.seconds_wasted == pytest.approx(0, abs=1e-3 * product.seconds)


# -- odd sizes -------------------------------------------------------------------------------------


def head(vocabulary: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Linear(768, vocabulary, bias=False).bfloat16(), torch.empty(512, 768).bfloat16()


@pytest.mark.parametrize("knobs", ["typical", None])
@pytest.mark.parametrize(("align", "wider"), [(16, 50264), (128, 50304)])
def test_an_odd_vocabulary_costs_what_the_wider_model_costs(
    align: int, wider: int, knobs: str | None
) -> None:
    """At one clock: a wider product that is faster draws more power."""
    execution = rt.tools.execution_model("eager", knobs=knobs)
    module, x = head(50257)
    chip = replace(H200, sustained_compute=None)
    est = rt.estimate(module, x, chip=chip, execution=execution)
    (product,) = est.census(align=align).products
    assert product.odd == ("N",) and product.aligned == (512, wider, 768)
    module, x = head(wider)
    padded = rt.estimate(module, x, chip=chip, execution=execution)
    assert product.aligned_flops == padded.flops - est.flops
    (row,), (other,) = est.rows, padded.rows
    more = other.timing.t_device - row.timing.t_device
    assert product.aligned_seconds == pytest.approx(more, rel=1e-6, abs=1e-12)


def test_sizes_are_odd_by_the_rows_that_lie_in_memory() -> None:
    module, x = head(50257)
    est = rt.estimate(module, x.requires_grad_(), chip=H200, phase="training", execution="eager")
    odd = {p.shape: p.odd for p in est.census().products}
    assert odd == {
        (512, 50257, 768): ("N",),  # rows of y
        (512, 768, 50257): ("K",),  # rows of dy
        (50257, 768, 512): ("M",),  # dy again, read by its columns
    }
    even = rt.estimate(nn.Linear(768, 8), torch.ones(511, 768))
    assert even.census().odd == (), "511 rows: each begins at a multiple of 16 bytes"


def test_no_alignment_is_no_alignment() -> None:
    module, x = head(50257)
    est = rt.estimate(module, x, chip=H200)
    assert est.census(align=1).odd == ()
    with pytest.raises(ValueError, match="align=0: expected bytes, 1 or more"):
        est.census(align=0)


def test_a_census_as_a_frame_and_as_json() -> None:
    census = rt.estimate(gpt2(), input_ids=TOKENS).census()
    frame = census.to_frame()
    assert int(frame.flops.sum()) == census.flops == sum(p.flops for p in census.products)
    document = census.to_dict()
    assert document["flops_matrix"] == census.flops_matrix
    assert [row["rows"] for row in census.to_rows()] == list(frame["rows"])
    assert "products" in repr(census)
