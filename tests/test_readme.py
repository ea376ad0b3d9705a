"""The README shows what the program prints, and names commands that exist."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

BLOCK = re.compile(r"<!-- golden: (?P<name>[\w.]+) -->\n```\n(?P<text>.*?)```", re.DOTALL)


def test_output_in_the_readme_is_that_of_the_goldens(
    root: Path, request: pytest.FixtureRequest
) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    blocks = {match["name"]: match["text"] for match in BLOCK.finditer(readme)}
    assert blocks, "the README shows no output"
    for name, text in blocks.items():
        golden = (root / "tests" / "golden" / name).read_text(encoding="utf-8")
        assert text == golden, f"README block {name} is not tests/golden/{name}: run `make golden`"


def test_commands_in_the_readme_exist(root: Path) -> None:
    from rooftrace.reporting.cli import cli

    readme = (root / "README.md").read_text(encoding="utf-8")
    used = set(
        re.findall(
            r"rooftrace (report|trace|diff|chips|measure|sweep|lock|calibrate|validate)\b", readme
        )
    )
    assert used <= set(cli.commands)


def test_every_public_name_is_there() -> None:
    import rooftrace

    for module in (rooftrace, rooftrace.extend, rooftrace.tools, rooftrace.types):
        for name in module.__all__:
            assert getattr(module, name) is not None
