"""The callback for the Trainer of Lightning, under either of its names."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError
from rooftrace.measured.live.trainers import Watching

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_WITHOUT = (
    "rooftrace.tools.lightning_callback needs Lightning, which is not installed: pip install "
    "lightning, or pytorch-lightning"
)
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""What a LightningModule that torch.compile wrapped has as its own attributes."""

_COUNTED = (
    "counted are training_step with its loss, the backward from it and the optimizer; other hooks "
    "of the module, and clipping of gradients, are in the time alone"
)


def lightning_callback(**options: Any) -> Any:
    """A callback for Lightning's Trainer: MFU, tokens/s and step time beside the prediction.

        trainer = lightning.Trainer(callbacks=[rooftrace.tools.lightning_callback(chip="h100-sxm")])

    It logs `rooftrace/mfu`, `rooftrace/tokens_per_s`, `rooftrace/step_s`,
    `rooftrace/expected_step_s` and the like through the module's own `log_dict`, every
    `log_every_n_steps` batches, for the batches since the last time; so they reach the loggers and
    `trainer.callback_metrics`, and MFU the progress bar.  A step is one training batch, and the
    optimizer counts where it stepped; validation and loading of data are in none.  Figures are of
    the first process and its device.  After training `print(callback)` shows everything, and
    `callback.result` has it.

    What is counted is `training_step` with its loss, run again on meta copies with no trainer
    attached.  With manual optimization it is the calls of the module's children.

    options: chip, execution, warmup, profile, kinds, items, graph and clock, as for
    `rooftrace.live`; items is given the batch.  Raises RequestError for another option, and without
    Lightning; training begins with what `rooftrace.live` raises.
    """
    base: Any = _callback_class()

    class RooftraceCallback(OfLightning, base):  # type: ignore[misc]
        """Watches a training of Lightning's Trainer."""

        def __init__(self, options: Mapping[str, Any]) -> None:
            base.__init__(self)
            OfLightning.__init__(self, options)

    return RooftraceCallback(options)


def _callback_class() -> Any:
    """The base class of callbacks, of the package that the program has loaded already, if any."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).Callback
    raise RequestError(_WITHOUT)


class OfLightning(Watching):
    """The methods that Lightning's Trainer calls."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins."""
        if not trainer.is_global_zero:
            return
        self._batches = 0
        self._whole = bool(pl_module.automatic_optimization)
        more: dict[str, Any] = {}
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            more["execution"] = "compiled"
        if self._whole:
            step = _TrainingStep(trainer)
            self.begin_training([pl_module], forward=step, counted=_COUNTED, **more)
        else:
            children = [m for m in pl_module.children() if any(True for _ in m.parameters())]
            self.begin_training(children, **more)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch begins, on the device already."""
        if self.live is None:
            return
        self.live.abandon()
        self.live.begin()
        if self._whole:
            self.live.note_call(0, (batch,), {})

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A backward begins from this loss."""
        if self.live is not None and self._whole:
            self.live.watch(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has ended; every so many of them are logged."""
        if self.live is None:
            return
        self.live.end()
        self._batches += 1
        every = int(trainer.log_every_n_steps)
        if every and self._batches % every == 0:
            figures = self.logged()
            shown = {name: value for name, value in figures.items() if name.endswith("/mfu")}
            rest = {name: value for name, value in figures.items() if name not in shown}
            settings = {"on_step": True, "on_epoch": False, "batch_size": 1}
            pl_module.log_dict(shown, prog_bar=True, rank_zero_only=True, **settings)
            pl_module.log_dict(rest, rank_zero_only=True, **settings)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training has ended."""
        self.end_training()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training has failed."""
        self.end_training()


class _TrainingStep:
    """Runs `training_step` of a copy of the module on meta, in the precision of the training."""

    def __init__(self, trainer: Any) -> None:
        self._precision = trainer.precision_plugin

    def __call__(self, module: nn.Module, batch: Any) -> Any:
        if getattr(module, "_compiler_ctx", None) is not None:
            for name in _COMPILED:  # these are bound to the module that is trained
                vars(module).pop(name, None)
        vars(module)["_device"] = torch.device("meta")
        kind: Any = type(module)
        step = kind.training_step
        takes = inspect.signature(step).parameters
        more = {"batch_idx": 0} if "batch_idx" in takes else {}
        with self._precision.train_step_context():
            output = step(module, batch, **more)
        return output["loss"] if isinstance(output, Mapping) else output

    def __deepcopy__(self, memo: Any) -> _TrainingStep:
        return self
