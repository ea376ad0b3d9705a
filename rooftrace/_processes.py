"""Starts other Pythons that import nothing from the working folder, as the installed command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

SAFE = "PYTHONSAFEPATH"


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Inside, Pythons that this process starts look for no module in the working folder.

    multiprocessing starts them with `-c`, which looks there first: a `multiprocessing.py` of a
    cloned repository would run.  It hands them the import path of this process, so modules that are
    found here are found there.  Python 3.10 does not know the variable.
    """
    before = os.environ.get(SAFE)
    os.environ[SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE, None)
        if before is not None:
            os.environ[SAFE] = before
