"""FlexAttention is one op that knows which pairs its mask shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op

pytestmark = pytest.mark.quick

LENGTH, HEADS, WIDTH = 160, 4, 16
DOCUMENT = 37  # tokens
COMPILED = torch.compile(flex.flex_attention)


class Attention(nn.Module):
    """Self-attention with a mask function, or one that looks into a buffer."""

    def __init__(self, mask: Any, kernel: Any = flex.flex_attention, score_mod: Any = None) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.register_buffer("document", torch.arange(LENGTH) // DOCUMENT)
        self.mask, self.kernel, self.score_mod = mask, kernel, score_mod

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        mask = same_document(self.document) if self.mask == "document" else self.mask
        blocks = (
            None
            if mask is None
            else flex.create_block_mask(mask, None, None, LENGTH, LENGTH, device=x.device)
        )
        return self.kernel(q, k, v, score_mod=self.score_mod, block_mask=blocks)


def same_document(document: Tensor) -> Any:
    def shown(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    return shown


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 32)


def traced(module: nn.Module, phase: str = "forward") -> OpGraph:
    return rt.trace(module, torch.empty(2, LENGTH, HEADS * WIDTH, device="meta"), phase=phase)


def kernels(graph: OpGraph) -> list[Op]:
    return [op for op in graph.ops if "flex_attention" in op.name]


def pairs(shown: Callable[[int, int], bool]) -> int:
    return sum(shown(i, j) for i in range(LENGTH) for j in range(LENGTH))


@pytest.mark.parametrize("kernel", [flex.flex_attention, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("mask", "kind", "shown"),
    [
        (causal, "causal", lambda i, j: i >= j),
        (window, "sliding-window", lambda i, j: i - 32 < j <= i),
        ("document", "chunked", lambda i, j: i // DOCUMENT == j // DOCUMENT and i >= j),
    ],
)
def test_flex_attention_knows_the_pairs_that_its_mask_shows(
    mask: Any, kind: str, shown: Callable[[int, int], bool], kernel: Any
) -> None:
    graph = traced(Attention(mask, kernel))
    (op,) = kernels(graph)
    assert op.facts == {"mask": kind, "visible_pairs": pairs(shown)}
    assert graph.values[op.outputs[0]].shape == (2, HEADS, LENGTH, WIDTH)
    assert not graph.assumptions
    assert not any(op.name in ("aten.tril", "aten.equal") for op in graph.ops), "our own questions"


def test_flex_attention_without_a_mask_shows_all() -> None:
    (op,) = kernels(traced(Attention(None)))
    assert op.facts == {"mask": "none"}


def test_what_a_mask_takes_from_unknown_values_is_visible_and_said() -> None:
    module = Attention("document")
    module.register_buffer("document", torch.empty(LENGTH, dtype=torch.long, device="meta"))
    graph = traced(module.to("meta"))
    (op,) = kernels(graph)
    assert op.facts == {"mask": "causal", "visible_pairs": pairs(lambda i, j: i >= j)}
    assert "mask" in [a.kind for a in graph.assumptions]


def test_flex_attention_has_one_backward_op() -> None:
    graph = traced(Attention(causal), "training")
    forward, backward = kernels(graph)
    assert (forward.part, backward.part) == ("forward", "backward")
    assert backward.name == "rooftrace.flex_attention_backward"
    assert backward.facts == forward.facts
    assert not rt.plan(graph, "eager").coverage.unsupported


def test_what_a_score_mod_does_is_not_counted_and_that_is_said() -> None:
    graph = traced(Attention(None, score_mod=lambda score, b, h, i, j: score + (i - j)))
    assert [a.kind for a in graph.assumptions] == ["score-mod"]


def test_flex_attention_is_itself_again_afterwards() -> None:
    before = flex.flex_attention_hop
    traced(Attention(causal))
    assert flex.flex_attention_hop is before
    with pytest.raises(ValueError, match="only supported on"):
        q = torch.empty(1, 1, 8, 8, device="meta")
        flex.flex_attention(q, q, q)
