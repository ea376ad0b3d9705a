"""What an emulated device cannot show: one error that names the call, its line, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftrace.tracer.source import TraceError, source_line

_RULES = (
    "To count a kernel of your own, make it an op with torch.library.custom_op and a "
    "register_fake, and give it a rule with rooftrace.rule (docs/rules.md)"
)


class DeviceError(TraceError):
    """A call that needs a real device: names it, the user's line, and what to do instead."""

    @classmethod
    def of(cls, call: str, reason: str, instead: str = "") -> DeviceError:
        """The error about one call.

        call: as the user writes it.  reason: why no emulated device can answer.  instead: what to
        do, a sentence without its full stop.
        """
        line = source_line(2)
        at = f" at {line}" if line else ""
        text = f"{call}{at} needs a GPU, and this one is emulated: {reason}"
        return cls(f"{text}. {instead}" if instead else text)


class MissingExtensionError(DeviceError, ImportError):
    """A compiled extension for CUDA is imported: code that has another way may catch it."""


class MissingLibraryError(DeviceError, OSError):
    """A compiled library for CUDA is loaded: code that has another way may catch it."""


def refusal(call: str, reason: str, instead: str = "") -> Callable[..., Any]:
    """A function that fails with the error about `call`."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise DeviceError.of(call, reason, instead)

    return refused


def kernel_refused(what: str, kind: type[DeviceError] = DeviceError) -> DeviceError:
    """The error about code that was compiled for a GPU."""
    return kind.of(what, "its kernels cannot be seen, so their cost is not known", _RULES)
