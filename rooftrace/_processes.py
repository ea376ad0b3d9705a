"""Starts other Pythons that import nothing from the working folder, as the installed command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SAFE = "PYTHONSAFEPATH"


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Inside, Pythons that this process starts look for no module in the working folder.

    multiprocessing starts them with `-c`, which looks there first: a `multiprocessing.py` of a
    cloned repository would run.  It hands them the import path of this process, so modules that are
    found here are found there.  Python 3.10 does not know the variable.
    """
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE, None)
        if before is not None:
            os.environ[_SAFE] = before


def started_again() -> dict[str, str]:
    """The environment for `python -m` of a module of rooftrace, which comes from where it is now.

    So it need not be in the working folder, which is not looked into.
    """
    path = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {**os.environ, _SAFE: "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
