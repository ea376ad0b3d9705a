"""The callback for the Trainer of transformers, and the session that all such callbacks share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rooftrace.errors import RequestError, hint
from rooftrace.measured.live.results import LiveResult
from rooftrace.measured.live.session import LiveSession

_OPTIONS = ("chip", "execution", "warmup", "profile", "kinds", "items", "graph", "clock")
_log = logging.getLogger("rooftrace")


class Watching:
    """Watches a training, and remembers what it reached.

    Only the first process watches: its figures are of one device.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise RequestError(
                    f"{name}={options[name]!r:.40}: expected {', '.join(_OPTIONS)}"
                    f"{hint(name, _OPTIONS)}"
                )
        self._options = dict(options)
        self._told: set[str] = set()
        self.live: LiveSession | None = None

    @property
    def result(self) -> LiveResult:
        """What the training reached so far.  Raises RequestError before it has begun."""
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
            if reason not in self._told:
                self._told.add(reason)
                _log.warning("rooftrace: %s", reason)
        return figures

    def end_training(self) -> None:
        """The training has ended, or failed."""
        if self.live is not None:
            self.live.close()


# -- trainers --------------------------------------------------------------------------------------
# The callback for the Trainer of transformers.

_WITHOUT = (
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
        raise RequestError(_WITHOUT) from None

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
    """The handler that calls a callback, and its trainer; None for what is not in the stack.

    The Trainer hands neither to its callbacks.  The first is needed because loggers that are called
    before do not see what a callback adds to the logs; the second has the module that is called,
    which torch.compile or DDP may have wrapped.
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
