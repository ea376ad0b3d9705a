"""Inventories and checkpoints on the command line, in words, as figures, and `dump_model_info`."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.reporting.commands.inventories import MOST, distributions
from rooftrace.reporting.views.results import as_markdown
from tests.reporting.conftest import Run

pytestmark = pytest.mark.usefixtures("kept_targets")

safetensors = pytest.importorskip("safetensors.torch")

CODE = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
def wider():
    return nn.Linear(256, 8192)
"""


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))


@pytest.fixture
def here(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "t.py").write_text(CODE)
    x = torch.randn(4, 4)
    safetensors.save_file({"w": x, "b": torch.ones(4)}, str(tmp_path / "a.safetensors"))
    safetensors.save_file({"w": x * 1.5, "b": torch.ones(4)}, str(tmp_path / "b.safetensors"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the command line ------------------------------------------------------------------------------


def test_an_inventory_needs_no_inputs(here: Path, run: Run) -> None:
    ran = run("inventory", "t.py:build")
    assert ran.code == 0, ran.err
    assert "262,912: 262,912 trainable, 0 frozen" in ran.out
    assert re.search(r"0\.weight +Linear +\[512, 256\] +fp32 +131,072 +512\.0 KiB +yes", ran.out)
    assert "values" not in ran.out


def test_weights_of_code_are_built_and_drawn(here: Path, run: Run) -> None:
    ran = run("inventory", "t.py:build", "--plot", "w.png", "--format", "json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["schema"] == "rooftrace.inventory/1"
    first = document["tensors"][0]["statistics"]
    bound = 1 / 256**0.5  # of nn.Linear's own initialisation
    assert -bound <= first["min"] < -0.9 * bound and first["std"] == pytest.approx(
        bound / 3**0.5, rel=0.02
    )
    assert (here / "w.png").read_bytes()[:4] == b"\x89PNG"


def test_a_checkpoint_has_an_inventory_too(here: Path, run: Run) -> None:
    ran = run("inventory", "a.safetensors", "--weights", "--format", "md", "-o", "a.md")
    assert ran.code == 0, ran.err
    page = (here / "a.md").read_text()
    assert "| `b` | [4] | fp32 | 4 | 16 B |" in page
    assert "| `b` | 1 | 0 | 1 | 1 | 0 % | 0 |" in page


def test_two_targets_by_their_parameters(here: Path, run: Run) -> None:
    ran = run("inventory", "t.py:build", "--against", "t.py:wider")
    assert ran.code == 0, ran.err
    assert f"262,912 -> {257 * 8192:,}" in ran.out
    refused = run("inventory", "t.py:build", "--against", "t.py:wider", "--weights")
    assert refused.code == 2 and "--against" in refused.err


def test_a_diff_of_checkpoints(here: Path, run: Run) -> None:
    ran = run("diff", "a.safetensors", "b.safetensors")
    assert ran.code == 0, ran.err
    assert "1 drifted and 1 frozen (the same bytes)" in ran.out
    assert re.search(r"w +50\.0 %", ran.out)
    document = json.loads(run("diff", "a.safetensors", "b.safetensors", "--format", "json").out)
    assert document["schema"] == "rooftrace.checkpoints/1"
    (w,) = [row for row in document["tensors"] if row["name"] == "w"]
    assert w["drift"]["relative"] == pytest.approx(0.5) and w["drift"]["cosine"] == pytest.approx(1)
    named = run("diff", "a.safetensors", "b.safetensors", "--names", "old,new")
    assert named.out.startswith("old -> new")


def test_conditions_on_checkpoints(here: Path, run: Run) -> None:
    ran = run("diff", "a.safetensors", "b.safetensors", "--fail-on", "drift>1%")
    assert ran.code == 1 and "w: drift grew by +50.0 %" in ran.err
    assert run("diff", "a.safetensors", "b.safetensors", "--fail-on", "drift>60%").code == 0
    refused = run("diff", "a.safetensors", "b.safetensors", "--fail-on", "time>5%")
    assert refused.code == 2 and "one of drift, params" in refused.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("diff", "a.safetensors", "b.safetensors", "--phase", "decode", "--tf32"),
            "--phase, --tf32",
        ),
        (("diff", "a.safetensors", "t.py:build"), "of two kinds"),
        (("diff", "a.safetensors", "nope.safetensors"), "there is no such file"),
        (("diff", "a.safetensors", "cut.safetensors"), "are not in"),
        (("inventory", "cut.safetensors"), "are not in"),
        (("inventory", "t.py:nope"), "there is no 'nope'"),
        (("inventory", "a.safetensors", "--trust-remote-code"), "is a checkpoint"),
        (("inventory", "t.py:build", "--trust-remote-code"), "runs as it is"),
        (("inventory", "saved.json"), "saved.json"),
    ],
)
def test_wrong_requests_end_in_one_line(
    arguments: tuple[str, ...], message: str, here: Path, run: Run
) -> None:
    (here / "cut.safetensors").write_bytes((here / "a.safetensors").read_bytes()[:-1])
    ran = run(*arguments)
    assert ran.code == 2 and message in ran.err
    assert len(ran.err.splitlines()) == 1, ran.err


# -- words and figures -----------------------------------------------------------------------------


def test_alike_layers_stand_in_one_row_of_a_screen() -> None:
    deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)])
    made = rt.inventory(deep)
    assert "*.weight x40" in str(made)
    page = as_markdown(made)
    assert "`39.weight`" in page and "x40" not in page
    pooled = torch.cat([layer.weight.detach().flatten() for layer in deep])  # type: ignore[union-attr]
    (row,) = [line for line in str(made).splitlines() if re.match(r"\*\.weight x40 +-?\d", line)]
    assert float(row.split()[3]) == pytest.approx(float(pooled.std()), rel=1e-3)


def test_a_hostile_name_is_shown_and_does_not_act() -> None:
    odd = nn.Module()
    odd.register_parameter("a|b\x1b[31m<b>", nn.Parameter(torch.ones(2)))
    assert "\x1b" not in str(rt.inventory(odd))
    assert "<b>" not in re.sub(r"`[^`]*`", "", as_markdown(rt.inventory(odd)))


def test_a_figure_has_a_histogram_for_each_tensor() -> None:
    figure = distributions(rt.inventory(model()))
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert [name for name in texts if "weight" in name or "bias" in name] == [
        "0.weight", "0.bias", "2.weight", "2.bias"]  # fmt: skip
    (steps,) = figure.axes[0].patches
    assert sum(steps.get_data().values) == 256 * 512  # type: ignore[attr-defined]


def test_of_very_many_tensors_the_largest_are_drawn() -> None:
    deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)])
    figure = distributions(rt.inventory(deep))
    assert len(figure.axes) == MOST
    assert f"the {MOST} largest of 120" in figure.texts[1].get_text()


def test_without_weights_nothing_is_drawn() -> None:
    with pytest.raises(rt.types.RequestError, match="no weights to draw"):
        distributions(rt.inventory(model(), weights=False))


# -- dump_model_info -------------------------------------------------------------------------------


def test_a_dump_prints_draws_and_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = rt.tools.dump_model_info(model())
    out = capsys.readouterr().out
    assert "262,912 trainable" in out and "0.weight" in out and "mean" in out
    assert (tmp_path / "model_weight_distributions.png").is_file()
    ratio = made.trainable_params / made.total_params  # type: ignore[operator]
    largest = max(made.layers, key=lambda layer: layer.num_params)
    assert (ratio, largest.name, made.num_layers) == (1.0, "0.weight", 4)
    assert made.total_memory_mb / 1024 == pytest.approx(262_912 * 4 / 2**30)


def test_a_dump_goes_to_a_logger(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    logger = logging.getLogger("dump")
    with caplog.at_level(logging.INFO, "dump"):
        rt.tools.dump_model_info(model().to("meta"), logger=logger, save_path=tmp_path / "w.png")
    levels = {record.levelname for record in caplog.records}
    assert levels == {"INFO", "WARNING"}
    assert any("no figure: Sequential: no weights to draw" in r.message for r in caplog.records)
    assert all("\n" not in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Linear(48, 8),), "fp32[1, 48]"),
        ((nn.Conv2d(3, 4, 7), nn.ReLU()), "fp32[1, 3, 224, 224]"),
        ((nn.Embedding(50, 8), nn.Linear(8, 8)), "int64[1, 128]"),
    ],
)
def test_a_dump_without_inputs_prices_a_step_and_says_its_guess(
    layers: tuple[nn.Module, ...], shape: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "m.md"
    rt.tools.dump_model_info(nn.Sequential(*layers), plot_distributions=False, report_path=path)
    out, page = capsys.readouterr().out, path.read_text()
    assert "limited by" in out and "The input is a guess" in out
    assert "## Verdict" in page and shape.partition("[")[2] in page.partition("is a guess")[2]


def test_a_dump_of_a_model_of_hugging_face_needs_no_inputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        vocab_size=100, max_position_embeddings=64,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    rt.tools.dump_model_info(made, plot_distributions=False, phases=["decode"])
    out = capsys.readouterr().out
    assert "decode 1 x 1 token" in out and "The batch is a guess: 1" in out


def test_a_report_where_the_module_can_be_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reports" / "model.md"
    rt.tools.dump_model_info(
        model(), plot_distributions=False, report_path=path, input_data=torch.ones(8, 256),
        chip="l4", tensor_core_b_sat=32, phases=["forward"],
    )  # fmt: skip
    text = path.read_text()
    assert "## Inventory of Sequential" in text and "# Sequential, 262.9 K parameters" in text
    assert "seed-efficient" in text
    assert (tmp_path / "reports" / "model" / "roofline.png").is_file()
    assert f"report written to {path}" in capsys.readouterr().out


def test_the_saturation_of_a_dump_is_that_of_its_report(tmp_path: Path) -> None:
    times = []
    for b_sat in (8, 64):
        folder = tmp_path / str(b_sat)
        rt.tools.dump_model_info(
            model(), plot_distributions=False, report_path=folder, input_data=(torch.ones(8, 256),),
            tensor_core_b_sat=b_sat, phases=["forward"], dtype="bf16",
        )  # fmt: skip
        assert (folder / "inventory.md").is_file()
        document = json.loads((folder / "report.json").read_text())
        times.append(json.dumps(document["phases"]["forward"]))
    assert times[0] != times[1]


def test_a_report_of_a_module_that_cannot_be_called_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.md"
    narrow = nn.Sequential(nn.Linear(8, 4), nn.Linear(8, 4))
    rt.tools.dump_model_info(narrow, plot_distributions=False, report_path=path)
    text = path.read_text()
    assert "72 trainable" in text
    assert "No costs of a step: " in text and "The input is a guess" in text
    assert "No costs of a step: " in capsys.readouterr().out
    rt.tools.dump_model_info(narrow, plot_distributions=False)
    assert "note: no report: " in capsys.readouterr().out


def test_arguments_of_a_dump_that_make_no_sense() -> None:
    for wrong, message in (
        ({"report_path": "x.html"}, r"expected a \.md file or a folder"),
        ({"report_path": "x.md", "tensor_core_b_sat": -1}, "positive number of rows"),
        ({"enable_tensor_core_model": False, "tensor_core_b_sat": 64}, "enable_tensor_core_model"),
    ):
        with pytest.raises(rt.types.RequestError, match=message):
            rt.tools.dump_model_info(model(), plot_distributions=False, **wrong)  # type: ignore[arg-type]
    with pytest.raises(rt.types.RequestError, match=r"expected a torch\.nn\.Module"):
        rt.tools.dump_model_info(3)
