"""What is refused inside of a recording: it would measure, or record, what stands on meta."""

from __future__ import annotations

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rooftrace.errors import RequestError
from rooftrace.tracer.recording.recorder import Recorder


def check_not_inside(what: str, instead: str) -> None:
    """Raise RequestError in a thread that a recording follows.  instead: what to do."""
    if any(isinstance(mode, Recorder) for mode in _get_current_dispatch_mode_stack()):
        raise RequestError(
            f"{what} inside of another recording (a capture, a trace, a script that is run), whose "
            f"modules stand on the meta device: {instead}"
        )
