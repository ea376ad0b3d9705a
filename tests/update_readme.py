"""Copies tests/golden into the README's blocks; `make golden` runs it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- golden: ([\w.]+) -->\n```\n).*?```", re.DOTALL)


def main() -> None:
    """Rewrite README.md."""
    readme = ROOT / "README.md"

    def fill(match: re.Match[str]) -> str:
        golden = (ROOT / "tests" / "golden" / match[2]).read_text(encoding="utf-8")
        return f"{match[1]}{golden}```"

    readme.write_text(BLOCK.sub(fill, readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
