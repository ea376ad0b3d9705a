"""Whether an argument is a measured run or a target to trace; loads little to tell."""

from __future__ import annotations

import os
from typing import Any

from rooftrace.errors import ProfileError


def is_measured(source: Any) -> bool:
    """Whether a source is a measured run: a Trace, a Run, or a file of one."""
    if not isinstance(source, (str, os.PathLike)):
        return type(source).__module__.startswith("rooftrace.measured")
    if not os.path.isfile(source):
        return False
    from rooftrace.measured.profiles import source_of  # a report of predictions does not load it

    try:
        return source_of(source).gives in ("run", "trace")
    except (ProfileError, OSError):  # a file of another kind: its reader will refuse it
        return False
