"""The tape by itself: tensors are recognised, bytes followed; tables name ops that exist."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from rooftrace.tracer.recording.by_value import ANSWERS
from rooftrace.tracer.recording.facts import FACTS
from rooftrace.tracer.recording.ops import HIDDEN_VIEWS, IDENTITIES, UNINITIALISED, Call
from rooftrace.tracer.recording.recorder import Recorder
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.recording.taperecords import META_KEY, Entry, Recorded, Spec
from rooftrace.tracer.values.masks import META
from rooftrace.tracer.values.values import Values
from tests.releases import TORCH

pytestmark = pytest.mark.quick

aten = torch.ops.aten


def tape() -> Tape:
    return Tape(Values(), record=True)


def entries_of(tape: Tape) -> list[tuple[str, str]]:
    entries = [node.meta.get(META_KEY) for node in tape.graph.nodes]
    return [(entry.kind, entry.name) for entry in entries if isinstance(entry, Entry)]


def test_a_tape_needs_no_mode() -> None:
    x, y = torch.empty(2, 3, device=META), torch.empty(2, 3, device=META)
    mine = tape()
    mine.enter(x, "input", "x")
    mine.record(Call.of(aten.add.Tensor, x, x), [y], single=True)
    (node,) = [n for n in mine.graph.nodes if n.op == "call_function"]
    recorded = node.meta[META_KEY]
    assert isinstance(recorded, Recorded)
    assert recorded.specs == (Spec((2, 3), torch.float32, (3, 1), 2),)  # storage 1 is x
    assert entries_of(mine) == [("input", "x")]
    assert mine.node_of(y) is node


def test_a_piece_of_several_outputs_is_taken_out_once() -> None:
    x = torch.empty(4, device=META)
    pieces = [torch.empty(2, device=META) for _ in range(2)]
    mine = tape()
    mine.enter(x, "input", "x")
    mine.record(Call.of(aten.split.Tensor, x, 2), pieces)
    first = mine.node_of(pieces[1])
    assert first.target is operator.getitem
    assert mine.node_of(pieces[1]) is first


def test_another_object_of_the_same_bytes_is_the_same_value() -> None:
    x = torch.empty(4, device=META)
    mine = tape()
    mine.enter(x, "parameter", "x")
    for other in (x.data, nn.Parameter(x), x.as_subclass(torch.Tensor)):
        assert mine.node_of(other) is mine.node_of(x)
    half = x.data[:2]  # other bytes of it: a constant that shares its storage
    node = mine.node_of(half)
    assert node.meta[META_KEY].spec.storage == mine.node_of(x).meta[META_KEY].spec.storage
    assert [name for _, name in entries_of(mine)] == ["x", "constant_0"]


def test_a_weight_written_by_way_of_data_stays_that_weight() -> None:
    layer = nn.Linear(4, 4, bias=False, device=META)
    recorder = Recorder()
    recorder.name_modules(layer)
    with recorder, torch.no_grad():
        for _ in range(3):
            layer.weight.data.mul_(2.0)
    assert entries_of(recorder) == [("parameter", "weight")]
    assert not recorder.values.assumptions
    storages = {node.meta[META_KEY].specs[0].storage
                for node in recorder.graph.nodes if node.op == "call_function"}  # fmt: skip
    recorder.close()
    assert storages == {1}


def test_bytes_are_held_until_the_last_reference_goes() -> None:
    x = torch.empty(4, device=META)
    mine = tape()
    mine.enter(x, "input", "x")
    y, z = torch.empty(4, device=META), torch.empty(4, device=META)
    mine.record(Call.of(aten.neg.default, x), [y], single=True)
    view = y.view(2, 2)
    del y
    mine.record(Call.of(aten.neg.default, x), [z], single=True)
    del view
    last = mine.node_of(z)
    assert mine.tags.last_held == {2: last}  # y has storage 2
    mine.tags.end()
    assert mine.tags.survivors == {3}


@pytest.mark.parametrize(
    "name", sorted({*ANSWERS, *FACTS, *IDENTITIES, *HIDDEN_VIEWS, *UNINITIALISED})
)
def test_an_op_of_a_table_exists(name: str) -> None:
    """A name with a typing error would be a rule that never applies."""
    namespace, op = name.split(".")
    if name == "aten.cholesky" and TORCH >= (2, 15):
        pytest.skip("torch 2.15 took it out")
    if name == "aten._scaled_grouped_mm_v2" and TORCH < (2, 11):
        pytest.skip("of torch 2.11")
    if namespace == "torchvision":
        pytest.importorskip("torchvision")
    if namespace in ("flash_attn", "flashattn"):
        pytest.importorskip("flash_attn")
    if namespace == "torch_attn":  # what adds the ops, from torch 2.10 on
        pytest.importorskip("torch.nn.attention.varlen")
    assert hasattr(getattr(torch.ops, namespace), op)
