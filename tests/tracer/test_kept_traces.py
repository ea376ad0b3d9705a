"""Traces that are kept on disk are used again only for what they are of."""

from __future__ import annotations

from pathlib import Path

import pytest

import rooftrace as rt

MODEL = """
import torch
def build():
    return torch.nn.Linear(8, WIDTH), (torch.ones(4, 8),)
"""


@pytest.mark.parametrize("target", ["model.py:build", "model:build"])
def test_a_target_of_the_same_name_in_another_folder_is_another_one(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTRACE_CACHE", str(tmp_path / "kept"))
    flops = {}
    for width in (8, 16, 8):
        folder = tmp_path / f"project{width}"
        folder.mkdir(exist_ok=True)
        (folder / "model.py").write_text(MODEL.replace("WIDTH", str(width)))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        frame = rt.sweep(target, over={"batch": [4]}).frame()
        flops[width] = int(frame["flops_matrix"].iloc[0])
    assert flops == {8: 2 * 4 * 8 * 8, 16: 2 * 4 * 8 * 16}
    assert list((tmp_path / "kept").glob("*.json")), "nothing was kept"
