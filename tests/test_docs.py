"""The pages in docs/: their code runs, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.utils.flop_counter import flop_registry

from rooftrace.costmodels.fusion.joins import JOINS
from rooftrace.costmodels.registry.lookup import own_rules

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    before = dict(flop_registry)
    try:
        with own_rules():
            exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})
    finally:
        flop_registry.clear()
        flop_registry.update(before)


def test_the_page_on_fusion_has_every_join_with_its_limit() -> None:
    lines = (ROOT / "docs" / "fusion.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    table = {row[0].removesuffix(" (off)"): row for row in rows[2:]}
    assert list(table) == [join.name for join in JOINS]
    for join in JOINS:
        name, _, limit, inductor = table[join.name]
        assert name.endswith("(off)") != join.on
        assert limit.partition(" ")[0] == ("" if join.constant is None else str(join.constant))
        assert inductor.strip("`") in join.inductor or inductor == "inlining"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES],
                         ids=lambda page: page.stem)  # fmt: skip
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
