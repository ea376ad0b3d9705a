"""Models of timm as a row of its benchmarks ran them: which form, and its graph.

A run may have re-parameterised a model (branches folded into one convolution, norms into their
neighbours), and timm may have changed what a name stands for since.  The parameters that a row
gives tell: they are those of the model as it is built, or of its re-parameterised form, or of
neither.  Names decide nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import rooftrace as rt
from rooftrace._writing import write_bytes

if TYPE_CHECKING:
    import torch

PLAIN, FUSED = "", "fused"
CLOSE = 0.01
"""Relative difference of parameter counts up to which a model is taken for the one that ran."""


@dataclass(frozen=True)
class Counts:
    """Parameters of a model in millions.  fused: re-parameterised; None where it has no such form
    or does not take it."""

    plain: float
    fused: float | None = None

    def form(self, ran: float | None) -> str | None:
        """The form whose parameters are nearest to those that ran; None where neither is close.

        ran: as a row gives them, in millions; None: not given, so the model as it is built.
        """
        if ran is None:
            return PLAIN
        known = {PLAIN: self.plain} | ({} if self.fused is None else {FUSED: self.fused})
        off = {name: abs(round(count, 2) - ran) for name, count in known.items()}
        best = min(off, key=lambda name: off[name])
        return best if off[best] <= CLOSE * max(ran, 1.0) else None


@dataclass
class Zoo:
    """Counts of models, kept in a file of the folder where traces are kept."""

    folder: Path
    known: dict[str, list[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self._path.exists():
            self.known = json.loads(self._path.read_text())

    @property
    def _path(self) -> Path:
        return self.folder / "parameters.json"

    def counts(self, model: str) -> Counts | None:
        """The counts of a model; None where timm does not build it."""
        if model not in self.known:
            self.known[model] = _counted(model)
        plain, fused = self.known[model]
        return None if plain is None else Counts(plain, fused)

    def save(self) -> None:
        """Write what is known, whole or not at all."""
        write_bytes(self._path, json.dumps(self.known, indent=0, sort_keys=True).encode())


def _counted(name: str) -> list[float | None]:
    try:
        model = built(name, None)
    except Exception as error:  # whatever a library's model may raise
        print(f"{name}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return [None, None]
    if not any(_folds(part) for part in model.modules() if part is not model):
        return [_millions(model), None]
    plain = _millions(model)
    try:
        return [plain, _millions(fused(model))]
    except Exception as error:  # a part that cannot be folded
        print(f"{name}, folded: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return [plain, None]


def _folds(module: torch.nn.Module) -> bool:
    return any(hasattr(module, name) for name in ("fuse", "reparameterize", "switch_to_deploy"))


def _millions(model: torch.nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def built(name: str, size: int | None) -> torch.nn.Module:
    """The model as timm builds it, for images of `size` where that is a part of it."""
    import timm
    import torch

    def create() -> torch.nn.Module:
        if size is None:
            return timm.create_model(name)
        try:
            return timm.create_model(name, img_size=size)
        except TypeError:  # takes any size
            return timm.create_model(name)

    try:
        with torch.device("meta"):
            return create()
    except RuntimeError:  # some run a forward while they are built
        return create()


def fused(model: torch.nn.Module) -> torch.nn.Module:
    """The model re-parameterised by timm's own function, which computes with weights."""
    from timm.utils import reparameterize_model

    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model = model.to_empty(device="cpu")
    return reparameterize_model(model.eval(), inplace=True)


def graph_of(
    name: str, size: int, batch: int, form: str, phase: str, how: Mapping[str, str]
) -> rt.types.OpGraph:
    """The graph of a step.

    how: amp ("" where autocast is off), dtype, layout, and torch: the release that ran ("" before
    2.0, when attention was written out).
    """
    import timm.layers
    import torch

    class Amp(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            amp = how["amp"]
            with torch.autocast("cuda", getattr(torch, amp or "float16"), bool(amp)):
                return self.inner(x)

    timm.layers.set_fast_norm(phase == "forward")
    timm.layers.set_fused_attn(bool(how["torch"]))
    with _timm_of(how["torch"]):
        model = built(name, size)
    channels = model.default_cfg["input_size"][0]
    if form == FUSED:
        model = fused(model).to("meta")
    x = torch.empty(batch, channels, size, size, device="meta")
    model, x = (part.to(getattr(torch, how["dtype"])) for part in (model, x))
    if how["layout"] == "nhwc":
        model, x = (part.to(memory_format=torch.channels_last) for part in (model, x))
    step: dict[str, Any] = {"phase": phase, "torch": how["torch"] or "2.0"}
    if phase == "training":
        step |= {"loss": _cross_entropy, "optimizer": "sgd"}
    return rt.trace(Amp(model.eval()), x, **step)


@contextmanager
def _timm_of(torch_release: str) -> Iterator[None]:
    """timm as it was when this release of torch was new, where today's computes something else.

    Up to 2.8 (timm 1.0.9) vision transformers had PyTorch's layer norms, which autocast runs in
    fp32 (`partial(nn.LayerNorm, eps=1e-6)`; CLIP's name it too), and RmsNorm divided by the
    deviation, op by op, as today's SimpleNorm.  Up to 2.1 (timm 0.9.10) attention of VOLO was
    written out.
    """
    import torch
    from timm.layers import SimpleNorm
    from timm.layers.fast_norm import simple_norm
    from timm.models import vision_transformer, volo

    class RmsNorm(SimpleNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = simple_norm(x, self.normalized_shape, self.weight, self.eps)
            return found

    norms = {"LayerNorm": torch.nn.LayerNorm, "RmsNorm": RmsNorm}
    then = [((2, 8), vision_transformer, norms), ((2, 1), volo, {"use_fused_attn": lambda: False})]
    release = tuple(map(int, (torch_release or "1.0").split(".")))
    with ExitStack() as stack:
        for last, module, names in then:
            if release <= last:
                stack.enter_context(patch.multiple(module, **names))
        yield


def _cross_entropy(output: Any) -> Any:
    import torch

    target = torch.zeros(output.shape[0], dtype=torch.long, device=output.device)
    return torch.nn.functional.cross_entropy(output, target)
