"""What fusing saves: the parts add up to the difference of the totals."""

import pytest
from hypothesis import given, settings

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.studies.advice.variants import ATTENTION, CHAIN, EPILOGUE, Headroom, headroom
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs

BF16 = 2  # bytes
TRACED = [
    ("gpt2", "forward"), ("gpt2", "training"), ("llama", "training"), ("llama", "decode"),
    ("deepseek", "training"), ("deepseek", "decode"), ("resnet", "training"), ("lstm", "training"),
]  # fmt: skip


def check(found: Headroom) -> None:
    for savings, before, after in (
        (found.fused, found.before, found.after),
        (found.left, found.after, found.beyond),
    ):
        assert sum(s.bytes for s in savings) == before.bytes_hbm - after.bytes_hbm
        assert sum(s.launches for s in savings) == before.kernels - after.kernels
        assert sum(s.seconds for s in savings) == pytest.approx(
            before.times.t_serial - after.times.t_serial, rel=1e-9, abs=1e-15
        )
        assert before.plan.total.work == after.plan.total.work
        assert all(s.bytes >= 0 and s.seconds >= 0 for s in savings)
        assert all((len(s.ops) > 1) != (s.kind == "unread") for s in savings)
        assert [s.seconds for s in savings] == sorted((s.seconds for s in savings), reverse=True)
    assert found.beyond.bytes_hbm >= found.beyond.bytes_compulsory
    assert len({(s.name, s.module, s.part, s.ops, s.kind) for s in found.fused}) == len(found.fused)


@settings(deadline=None, max_examples=60)
@given(programs())
def test_savings_of_random_programs_add_up(program):
    check(headroom(program[0], "h100-sxm"))


@pytest.mark.parametrize("model, phase", TRACED)
def test_savings_of_real_models_add_up(traced, model, phase):
    found = headroom(traced(model, phase), "h100-sxm", "compiled")
    check(found)
    compiled = rt.estimate(traced(model, phase), "h100-sxm", "compiled")
    assert found.after.rows == compiled.rows
    assert headroom(compiled).fused == found.fused


@pytest.mark.parametrize("model, phase", [("gpt2", "forward"), ("resnet", "training")])
def test_before_is_the_eager_step_but_for_its_dispatch(traced, model, phase):
    eager = plan(traced(model, phase), "eager")
    assert headroom(traced(model, phase)).before.bytes_hbm == eager.total.bytes()


def test_an_eager_estimate_has_its_savings_too(traced):
    eager = rt.estimate(traced("gpt2", "forward"), "h100-sxm", "eager")
    found = headroom(eager)
    assert found.before.t_est == eager.t_est and found.before.bytes_hbm == eager.bytes_hbm
    assert found.after.execution.dispatch == "eager" and found.fused


def test_layers_that_are_alike_are_one_saving(traced):
    found = headroom(traced("llama", "decode"))
    gates = [s for s in found.fused if s.module.endswith("mlp.act_fn")]
    assert len(gates) == 1 and gates[0].count > 1
    assert gates[0].ops == ("aten.silu", "aten.mul")


# -- by hand ---------------------------------------------------------------------------------------


def test_what_a_group_keeps_on_the_chip_is_what_it_saves():
    b = Builder()
    x = b.input(64, 512)
    (saving,) = headroom(b.graph(b.unary("relu", b.unary("exp", x)))).fused
    assert saving.bytes == BF16 * 2 * 64 * 512  # written once, read once
    assert (saving.count, saving.launches, saving.kind) == (1, 1, "fused")


def test_an_epilogue_saves_the_result_of_the_product():
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    found = headroom(b.graph(b.unary("relu", b.mm(x, w))))
    assert not found.fused
    (left,) = found.left
    assert (left.kind, left.bytes) == (EPILOGUE, BF16 * 2 * 64 * 512)


def test_no_epilogue_where_something_else_reads_the_product():
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.mm(x, w)
    assert not headroom(b.graph(b.unary("relu", y), b.mm(y, w))).left


def test_attention_written_by_hand_saves_the_scores():
    b = Builder()
    q, k, v = b.input(256, 64), b.input(64, 256), b.input(256, 64)
    scores = b.softmax(b.mm(q, k))
    (left,) = headroom(b.graph(b.mm(scores, v))).left
    assert (left.kind, left.launches) == (ATTENTION, 2)
    assert left.bytes == BF16 * 4 * 256 * 256  # scores and probabilities, written and read


def test_a_chain_that_rows_interrupt_is_left():
    b = Builder()
    x = b.input(256, 512)
    y = b.sum(b.unary("exp", b.sum(x, dim=0)), dim=1)
    assert [s.kind for s in headroom(b.graph(y)).left] == [CHAIN]


def test_a_wait_between_two_groups_keeps_them_apart():
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.mm(x, w)
    b.item(b.sum(x))
    assert EPILOGUE not in {s.kind for s in headroom(b.graph(b.unary("relu", y))).left}


def test_frame_and_text_say_what_there_is(traced):
    found = headroom(traced("gpt2", "forward"))
    frame = found.to_frame()
    assert len(frame) == len(found.fused) + len(found.left)
    assert frame.bytes.sum() == found.before.bytes_hbm - found.beyond.bytes_hbm
    assert str(found).splitlines()[0] == str(found.fused[0])
    assert "less" in str(found)
