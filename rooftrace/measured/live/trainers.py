"""Callbacks for the Trainers of transformers and of Lightning, and the base class of all."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rooftrace.errors import RequestError, hint
from rooftrace.measured.live.results import LiveResult
from rooftrace.measured.live.session import LiveSession

_OPTIONS = ("chip", "execution", "warmup", "profile", "kinds", "items", "graph", "clock")
_log = logging.getLogger("rooftrace")


class Watching:
    """The session of a training, in its first process: figures are of one device."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise RequestError(
                    f"{name}={options[name]!r:.40}: expected {', '.join(_OPTIONS)}"
                    f"{hint(name, _OPTIONS)}"
                )
        self._options = dict(options)
        self._warned: set[str] = set()
        self.live: LiveSession | None = None

    @property
    def result(self) -> LiveResult:
        """The results so far.  Raises RequestError before the training has begun."""
        if self.live is None:
            raise RequestError(
                "the result of a callback is there when training has begun, in the first process"
            )
        return self.live.result

    def __str__(self) -> str:
        return "no training has begun" if self.live is None else str(self.live)

    def begin_training(self, modules: Sequence[nn.Module], **more: Any) -> None:
        """Make the session of a training that begins."""
        self.live = LiveSession(modules, **{**more, **self._options})

    def logged(self) -> dict[str, float]:
        """The figures since the last time, by the names that loggers see."""
        if self.live is None:
            return {}
        figures = self.live.since_last().logged()
        for reason in self.live.book.refused:
            if reason not in self._warned:
                self._warned.add(reason)
                _log.warning("rooftrace: %s", reason)
        return figures

    def end_training(self) -> None:
        """The training has ended, or failed."""
        if self.live is not None:
            self.live.close()


_NO_TRANSFORMERS = (
    "rooftrace.tools.trainer_callback needs transformers, which is not installed: pip install "
    '"rooftrace[hf]" accelerate'
)


def trainer_callback(**options: Any) -> Any:
    """A callback for transformers' Trainer: MFU, tokens/s and step time beside the prediction.

        trainer = Trainer(..., callbacks=[rooftrace.tools.trainer_callback(chip="h100-sxm")])

    It adds `rooftrace/mfu`, `rooftrace/tokens_per_s`, `rooftrace/step_s`,
    `rooftrace/expected_step_s` and the like to the Trainer's own logs, at its logging steps, for
    the steps since the last log; so they are printed, and reach TensorBoard and W&B.  A step is one
    of the optimizer, with all its micro-batches; evaluation, saving and loading of data are in
    none.  Figures are of the first process and its device.  After training `print(callback)` shows
    everything, and `callback.result` has it.

    options: chip, execution, warmup, profile, kinds, items, graph and clock, as for
    `rooftrace.live`.  Raises RequestError for another option, and without transformers; training
    begins with what `rooftrace.live` raises.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise RequestError(_NO_TRANSFORMERS) from None

    class RooftraceCallback(OfTrainer, TrainerCallback):  # type: ignore[misc]
        """Watches a training of transformers' Trainer."""

    return RooftraceCallback(options)


class OfTrainer(Watching):
    """The methods that the Trainer calls."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training begins: watch the model as the Trainer calls it, and come before loggers."""
        if not state.is_world_process_zero:
            return
        handler, trainer = _callers(self)
        if handler is not None:
            handler.callbacks.remove(self)
            handler.callbacks.insert(0, self)
        wrapped = getattr(trainer, "model_wrapped", None)
        self.begin_training([kwargs["model"] if wrapped is None else wrapped])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins."""
        if self.live is not None:
            self.live.abandon()  # the last micro-batches of an epoch that was stopped
            self.live.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step has ended."""
        if self.live is not None:
            self.live.end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The Trainer logs: add the figures since its last log of training."""
        if self.live is None or not logs or "loss" not in logs:
            return
        figures = self.logged()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training has ended."""
        self.end_training()


def _callers(callback: OfTrainer) -> tuple[Any, Any]:
    """The handler that calls a callback, and its trainer, from the stack; None if not there.

    The Trainer passes neither to its callbacks.  The handler is needed because loggers that are
    called earlier miss additions to the logs; the trainer has the module that is called, which
    torch.compile or DDP may have wrapped.
    """
    handler = trainer = None
    frame = sys._getframe(1)
    while frame is not None and trainer is None:
        owner = frame.f_locals.get("self")
        callbacks = getattr(owner, "callbacks", None)
        if handler is None and isinstance(callbacks, list) and callback in callbacks:
            handler = owner
        elif handler is not None and getattr(owner, "callback_handler", None) is handler:
            trainer = owner
        frame = frame.f_back  # type: ignore[assignment]
    return handler, trainer


# -- The callback for the Trainer of Lightning, under either of its names --------------------------

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_NO_LIGHTNING = (
    "rooftrace.tools.lightning_callback needs Lightning, which is not installed: pip install "
    "lightning, or pytorch-lightning"
)
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")
"""Instance attributes of a LightningModule that torch.compile wrapped."""

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

    Counted is `training_step` with its loss, run again on meta copies without a trainer.  With
    manual optimization counted are the calls of the module's children.

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
    """The base class of callbacks, preferably of a package that is already imported."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).Callback
    raise RequestError(_NO_LIGHTNING)


class OfLightning(Watching):
    """The methods that Lightning's Trainer calls."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Training begins."""
        if not trainer.is_global_zero:
            return
        self._batches = 0
        self._automatic = bool(pl_module.automatic_optimization)
        more: dict[str, Any] = {}
        if getattr(pl_module, "_compiler_ctx", None) is not None:
            more["execution"] = "compiled"
        if self._automatic:
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
        if self._automatic:
            self.live.note_call(0, (batch,), {})

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """A backward begins from this loss."""
        if self.live is not None and self._automatic:
            self.live.watch(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch has ended; the trainer logs every few batches."""
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
            for name in _COMPILED:  # bound to the module in training
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
