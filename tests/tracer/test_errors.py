"""What goes wrong is said in the user's terms: module, line, what was asked and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import RequestError, TraceError

pytestmark = pytest.mark.quick

X = torch.ones(2, 8)


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3)  # the line that fails


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_failure_names_the_module_and_the_users_line() -> None:
    with pytest.raises(TraceError) as caught:
        rt.trace(Outer(), X)
    first, *frames, advice = str(caught.value).splitlines()
    assert first == (
        "forward of Outer failed in module 'blocks.1' (Inner) at aten.mm: RuntimeError: a and b "
        "must have same reduction dim, but got [2, 8] X [3, 3]."
    )
    assert len(frames) == 2  # Outer.forward and Inner.forward; nothing of torch's or of ours
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line that fails" in text
    )
    assert f"test_errors.py:{line} in forward" in frames[-1]
    assert "torch.zeros(3, 3)" in frames[-1]
    assert "--input NAME=SHAPE:DTYPE" in advice


def test_a_failure_after_a_retried_branch_is_the_first_one(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.lin(x).sum() > 0:
            raise KeyError("the other way")
        raise ValueError("the way that was assumed")

    with pytest.raises(TraceError, match="ValueError: the way that was assumed"):
        rt.trace(module(forward).to("meta"), X)


def test_a_value_too_large_to_assume_says_so(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.nonzero(self.lin(x) @ torch.zeros(8, 1 << 22))

    with pytest.raises(
        TraceError,
        match=r"(?s)nonzero needs the value of a float32\[8, 4194304\] "
        r"tensor.*pass inputs that avoid that path",
    ):
        rt.trace(module(forward), torch.empty(8, 8, device="meta"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rt.trace(nn.Linear(8, 8), torch.ones(2, 9)), r"got \[2, 9\] X \[8, 8\]"),
        (
            lambda: rt.trace(nn.Linear(8, 8), X, phase="training", optimizer="sparseadam"),
            "SparseAdam does not support dense gradients",
        ),
    ],
)
def test_a_call_that_fails_is_a_trace_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rt.trace(nn.Linear(8, 8)), "missing a required argument: 'input'; it takes input"),
        (lambda: rt.trace(nn.Linear(8, 8), X, scale=3), r"trace\(scale=3\): no such argument"),
        (lambda: rt.trace(3, X), "expected a torch.nn.Module to trace, got int: 3"),
        (
            lambda: rt.trace(nn.Linear(8, 8), X, phase="train"),
            "phase 'train': expected one of forward, training, prefill, decode",
        ),
        (
            lambda: rt.trace(nn.ReLU(), X, phase="training"),
            "training of ReLU: no parameter requires a gradient",
        ),
        (
            lambda: rt.trace(nn.Embedding(4, 8).requires_grad_(False), X.long(), phase="training"),
            "training of Embedding: no parameter requires a gradient",
        ),
        (
            lambda: rt.trace(
                nn.Sequential(nn.Linear(8, 8), nn.Flatten()),
                X,
                phase="training",
                loss=lambda y: y.detach().sum(),
            ),
            "training of Sequential: no output needs a gradient; pass loss=",
        ),
        (
            lambda: rt.trace(nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8), phase="decode"),
            "decode of Conv2d: its forward takes and returns no cache; use --phase forward",
        ),
        (
            lambda: rt.trace(nn.Conv2d(3, 8, 3), torch.ones(1, 3, 8, 8), phase="prefill"),
            "prefill of Conv2d: its forward takes and returns no cache",
        ),
        (
            lambda: rt.trace(nn.Linear(8, 8), X, phase="training", optimizer="adamm"),
            "optimizer 'adamm': expected none or one of adadelta, adafactor, adagrad, adam,",
        ),
        (
            lambda: rt.trace(nn.Linear(8, 8), X, phase="training", optimizer="lbfgs"),
            "optimizer 'lbfgs': expected none or one of",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()


def test_decode_without_token_ids_asks_for_them(model: Callable[..., Any]) -> None:
    module = model("llama").module
    with pytest.raises(
        RequestError,
        match="decode of LlamaForCausalLM: pass the prompt as token ids, for example input_ids=ids",
    ):
        rt.trace(module, inputs_embeds=torch.ones(1, 4, 32), phase="decode")


def test_decode_of_a_model_that_was_told_to_keep_nothing() -> None:
    class Forgetful(nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> dict[str, Tensor]:
            return {"logits": input_ids.float()}

    for phase in ("prefill", "decode"):
        with pytest.raises(RequestError, match=f"{phase} of Forgetful: .* no cache"):
            rt.trace(Forgetful(), torch.ones(1, 4, dtype=torch.long), phase=phase)


def test_a_users_loss_decides_what_is_trained(model: Callable[..., Any]) -> None:
    case = model("perceptron")
    given = rt.trace(case.module, *case.args, phase="training", loss=lambda y: y.square().mean())
    assert not given.assumptions
    assert any(op.function == "MeanBackward0" for op in given.ops)
    unit = rt.trace(case.module, *case.args, phase="training")
    assert [(a.kind, a.value) for a in unit.assumptions] == [("loss", 1)]
