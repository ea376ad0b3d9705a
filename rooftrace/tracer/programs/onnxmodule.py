"""A graph of ONNX as a module: each step a call of torch.

What shapes are computed from stays in numpy, as a runtime that folds constants has it: it is known
while the module runs, and is no work of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from rooftrace.tracer.programs import onnxnumbers, onnxops


@dataclass(frozen=True, slots=True)
class Initializer:
    """A tensor of the file.  values: of a small one."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: numpy.ndarray[Any, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxStep:
    """A node of the graph; names of values, "" for an input that is left out."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


def known_ops() -> frozenset[str]:
    """The ops that are read."""
    return frozenset({*onnxops.OPS, *onnxnumbers.OPS, "Constant"})


class OnnxModule(nn.Module):
    """Runs the steps of an ONNX graph in their order."""

    def __init__(
        self,
        steps: Sequence[OnnxStep],
        held: Mapping[str, Initializer],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
    ) -> None:
        super().__init__()
        self.steps, self.inputs, self.outputs, self.opset = steps, inputs, outputs, opset
        self.known: dict[str, Any] = {}
        self.weights: dict[str, str] = {}
        for number, (name, item) in enumerate(held.items()):
            if item.values is not None:
                self.known[name] = item.values
                continue
            self.weights[name] = self._hold(f"weight_{number}", item)
        for step in steps:
            if step.op == "Constant":
                self._constant(step)
        last = {name: place for place, step in enumerate(steps) for name in step.inputs}
        self.last = {name: place for name, place in last.items() if name not in outputs}

    def _hold(self, name: str, item: Initializer) -> str:
        made = torch.empty(item.shape, dtype=item.dtype, device="meta")
        if item.dtype.is_floating_point:
            setattr(self, name, nn.Parameter(made))
        else:
            self.register_buffer(name, made)
        return name

    def _constant(self, step: OnnxStep) -> None:
        (value,) = step.attributes.values()
        if isinstance(value, Initializer):
            if value.values is None:
                held = self._hold(f"constant_{len(self.weights)}", value)
                self.weights[step.outputs[0]] = held
                return
            value = value.values
        self.known[step.outputs[0]] = numpy.asarray(value)

    def forward(self, *args: Any) -> Any:
        """The outputs of the graph; one alone is no tuple."""
        values: dict[str, Any] = {"": None, **self.known}
        values |= {name: getattr(self, held) for name, held in self.weights.items()}
        values |= dict(zip(self.inputs, args, strict=True))
        for place, step in enumerate(self.steps):
            if step.op == "Constant":
                continue
            made = self._run(step, [values[name] for name in step.inputs])
            made = made if isinstance(made, (tuple, list)) else (made,)
            values |= dict(zip(step.outputs, made, strict=False))
            for name in step.inputs:
                if self.last.get(name) == place:
                    values[name] = None
        results = tuple(values[name] for name in self.outputs)
        return results[0] if len(results) == 1 else results

    def _run(self, step: OnnxStep, inputs: list[Any]) -> Any:
        attributes = {"outputs": len(step.outputs), "opset": self.opset, **step.attributes}
        tensors = any(isinstance(item, Tensor) for item in inputs)
        if step.op in onnxnumbers.OPS and (not tensors or step.op in ("Shape", "Size")):
            small = onnxnumbers.OPS[step.op](attributes, *inputs)
            if small is not None:
                return small
        if not tensors and step.op not in ("ConstantOfShape", "Range"):
            inputs = [onnxops.tensor(item) for item in inputs]
        return onnxops.OPS[step.op](attributes, *inputs)
