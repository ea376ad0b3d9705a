"""Copies tests/golden into the README's blocks, and the list of the gallery into its page.

`make golden` runs it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "site"))

from docsite import gallery  # noqa: E402

BLOCK = re.compile(r"(<!-- golden: ([\w.]+) -->\n```\n).*?```", re.DOTALL)


def main() -> None:
    """Rewrite README.md and docs/gallery.md."""
    readme = ROOT / "README.md"

    def fill(match: re.Match[str]) -> str:
        golden = (ROOT / "tests" / "golden" / match[2]).read_text(encoding="utf-8")
        return f"{match[1]}{golden}```"

    readme.write_text(BLOCK.sub(fill, readme.read_text(encoding="utf-8")), encoding="utf-8")
    page = ROOT / "docs" / "gallery.md"
    filled = gallery.with_list(page.read_text(encoding="utf-8"), gallery.as_list(gallery.entries()))
    page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
