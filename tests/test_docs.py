"""The pages in docs/: their code runs, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.utils.flop_counter import flop_registry

from rooftrace.costmodels.registry.lookup import all_rules
from rooftrace.costmodels.registry.rulebook import RULES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    list(all_rules())  # loads them
    registries = [(registry, dict(registry)) for registry in (RULES, flop_registry)]
    try:
        exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})
    finally:
        for registry, before in registries:
            registry.clear()
            registry.update(before)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES],
                         ids=lambda page: page.stem)  # fmt: skip
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
