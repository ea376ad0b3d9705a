"""README.md and docs/ show what the program prints; the README names commands that exist."""

import re
from pathlib import Path

import pytest

from tests import update_readme

pytestmark = pytest.mark.quick

SHOWN = [page for page in update_readme.PAGES if update_readme.BLOCK.search(page.read_text())]


def test_the_readme_shows_output() -> None:
    assert update_readme.ROOT / "README.md" in SHOWN


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_output_on_a_page_is_that_of_the_goldens(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert update_readme.filled(text) == text, f"{page.name}: run `make golden`"


def test_a_block_is_filled_with_the_lines_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    whole, part = "<!-- golden: a.txt -->\n```\n", "<!-- golden: a.txt 2-3 -->\n```\n"
    page = f"{whole}old\n```\nText.\n\n{part}```\n"
    assert update_readme.filled(page, tmp_path) == (
        f"{whole}1\n2\n3\n```\nText.\n\n{part}2\n3\n```\n"
    )
    with pytest.raises(ValueError, match=r"a\.txt 2-4: it has 3 lines"):
        update_readme.filled(part.replace("2-3", "2-4") + "```\n", tmp_path)


def test_commands_in_the_readme_exist(root: Path) -> None:
    from rooftrace.reporting.cli import cli

    readme = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"^rooftrace (\w+)", "".join(blocks), re.MULTILINE))
    assert used and used <= set(cli.commands)
    assert len(readme.splitlines()) <= 200


def test_every_public_name_is_there() -> None:
    import rooftrace

    for module in (rooftrace, rooftrace.extend, rooftrace.tools, rooftrace.types):
        for name in module.__all__:
            assert getattr(module, name) is not None
