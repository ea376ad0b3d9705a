"""Git as a test asks it, by a user of its own and without the variables that hooks see."""

import os
import subprocess
from pathlib import Path

_SETTINGS = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "gc.auto=0")


def git(root: Path, *arguments: str) -> str:
    """What git prints when run in a folder."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *_SETTINGS, *arguments],
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
