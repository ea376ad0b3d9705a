"""Advice on masks of attention: of a known kind, and in buffers without values."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt

CHIP = "a100-sxm-80"
LENGTH = 256
IF_CAUSAL = "Attend with is_causal=True in place of a mask, if it is causal"


class Attention(nn.Module):
    """Heads that attend by `attend`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        parts = self.inner(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (8, 64)).transpose(1, 2) for y in parts)
        y: Tensor = self.outer(self.attend(q, k, v, keep).transpose(1, 2).flatten(2))
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Added(Attention):
    """A mask of minus infinity in a buffer, which is added to the scores."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        mask = torch.empty(LENGTH, LENGTH).fill_(float("-inf")).triu_(1)
        self.register_buffer("bias", mask, persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        scores = q @ k.mT * 0.125 + self.bias[: q.shape[2], : q.shape[2]]
        if keep is not None:
            scores = scores + keep
        return scores.float().softmax(-1).to(q.dtype) @ v


class Filled(Attention):
    """A buffer of ones up to the diagonal, where scores are kept."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(LENGTH, LENGTH)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        scores = (q @ k.mT * 0.125).masked_fill(self.seen.eq(0), float("-inf"))
        return scores.softmax(-1) @ v


class Passed(Added):
    """A mask that torch's attention reads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


class Learnt(Attention):
    """A bias for each head, query and key, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(1, 8, LENGTH, LENGTH))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.125 + self.bias
        return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


class LearntPassed(Learnt):
    """The same bias as a mask of torch's attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)


def step_of(kind: type[Attention], phase: str, device: str, *more: Tensor) -> rt.types.Estimate:
    with torch.device(device):
        model = nn.ModuleList([kind()]).half()[0]
    x = torch.empty(16, LENGTH, 512, device="meta").half()
    graph = rt.trace(model, x, *more, phase=phase, optimizer="adamw")
    return rt.estimate(graph, CHIP, "eager")


def actions(step: rt.types.Estimate) -> dict[str, rt.types.WhatIf]:
    options = rt.tools.guidance(step).options
    return {w.action: w for w in options if w.lever == "rewrite"}


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("kind", [Added, Filled])
def test_attention_written_out_is_told_the_kind_of_a_known_mask(
    kind: type[Attention], phase: str
) -> None:
    step, mended = step_of(kind, phase, "cpu"), step_of(Attention, phase, "cpu")
    told = actions(step)
    assert IF_CAUSAL not in told
    (action,) = (name for name in told if "written out in one kernel" in name)
    assert action.endswith("tell it the kind of its mask (is_causal=)")
    assert told[action].gain == pytest.approx(step.t_est - mended.t_est, rel=0.1)


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("kind", [Added, Filled, Passed])
def test_a_buffer_without_values_is_priced_as_causal_if_it_is(
    kind: type[Attention], phase: str
) -> None:
    step, mended = step_of(kind, phase, "meta"), step_of(Attention, phase, "meta")
    told = actions(step)[IF_CAUSAL]
    assert told.at_most and ("seen" if kind is Filled else "bias") in told.needs
    assert told.gain == pytest.approx(step.t_est - mended.t_est, rel=0.1)


def test_a_mask_that_is_also_of_an_input_is_none() -> None:
    keep = torch.empty(16, 1, 1, LENGTH, device="meta").half()
    assert IF_CAUSAL not in actions(step_of(Added, "forward", "meta", keep))


def test_a_learnt_bias_has_its_gradient_of_the_kernel() -> None:
    step, mended = (step_of(kind, "training", "meta") for kind in (Learnt, LearntPassed))
    told = actions(step)
    assert IF_CAUSAL not in told
    gain = told["Compute attention that is written out in one kernel"].gain
    assert gain == pytest.approx(step.t_est - mended.t_est, rel=0.15)
