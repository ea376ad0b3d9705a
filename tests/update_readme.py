"""Copies tests/golden into the blocks of README.md and docs/, and the gallery's list into its page.

A block begins with `<!-- golden: demo.txt -->`, or `<!-- golden: demo.txt 1-25 -->` for some of its
lines.  `make golden` runs this file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?P<head><!-- golden: (?P<name>[\w.]+)(?: (?P<first>\d+)-(?P<last>\d+))? -->\n```\n)"
    r"(?P<text>.*?)```",
    re.DOTALL,
)
sys.path.insert(0, str(ROOT / "site"))

from docsite import gallery  # noqa: E402


def filled(text: str, folder: Path = GOLDEN) -> str:
    """A page with each block as its golden has it.

    Raises ValueError for a block whose lines the golden does not have.
    """

    def fill(block: re.Match[str]) -> str:
        lines = (folder / block["name"]).read_text(encoding="utf-8").splitlines(keepends=True)
        first, last = int(block["first"] or 1), int(block["last"] or len(lines))
        if not 1 <= first <= last <= len(lines):
            raise ValueError(f"{block['name']} {first}-{last}: it has {len(lines)} lines")
        return f"{block['head']}{''.join(lines[first - 1 : last])}```"

    return BLOCK.sub(fill, text)


def main() -> None:
    """Rewrite the pages that show output, and docs/gallery.md."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if BLOCK.search(text):
            path.write_text(filled(text), encoding="utf-8")
    page = ROOT / "docs" / "gallery.md"
    with_list = gallery.with_list(
        page.read_text(encoding="utf-8"), gallery.as_list(gallery.entries())
    )
    page.write_text(with_list, encoding="utf-8")


if __name__ == "__main__":
    main()
