"""Two checkpoints compared: drift, names, dtypes, shapes, and what a config does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import rooftrace as rt
from rooftrace.tracer.targets import CheckpointError
from rooftrace.tracer.targets.checkpoints import SLICE, Stored
from rooftrace.weights import CheckpointDiff, compare_checkpoints

pytestmark = pytest.mark.quick

safetensors = pytest.importorskip("safetensors.torch")


def written(folder: Path, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Any:
    paths = folder / "before.safetensors", folder / "after.safetensors"
    for path, tensors in zip(paths, (before, after), strict=True):
        apart = {name: tensor.clone() for name, tensor in tensors.items()}
        safetensors.save_file(apart, str(path))
    return paths


def compared(
    folder: Path, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> CheckpointDiff:
    result = rt.diff(*written(folder, before, after))
    assert isinstance(result, CheckpointDiff)
    return result


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
)
def test_drift_is_what_torch_says_of_the_whole_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    x = torch.randn(SLICE + 999, dtype=kind).to(dtype)  # two slices, of another size each
    y = (torch.randn(SLICE + 999, dtype=kind) * 0.1 + x.to(kind)).to(dtype)
    (row,) = compared(tmp_path, {"w": x}, {"w": y}).tensors
    drift = row.drift
    assert row.status == "drifted" and drift is not None
    real = [torch.view_as_real(t) if dtype.is_complex else t.to(torch.float64) for t in (x, y)]
    a, b = (t.double().flatten() for t in real)
    assert drift.norm_before == pytest.approx(float(torch.linalg.vector_norm(a)), rel=1e-12)
    assert drift.norm_after == pytest.approx(float(torch.linalg.vector_norm(b)), rel=1e-12)
    assert drift.norm_difference == pytest.approx(float(torch.linalg.vector_norm(b - a)), rel=1e-12)
    assert drift.cosine == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), rel=1e-9)
    assert drift.largest == float((b - a).abs().max())
    assert drift.relative == drift.norm_difference / drift.norm_before


@given(
    pairs=st.lists(
        st.tuples(*[st.floats(-100, 100, width=32) | st.sampled_from([math.nan, math.inf])] * 2),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=60)
def test_what_is_not_finite_is_left_out_and_counted(
    pairs: list[tuple[float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    before, after = (torch.tensor(side) for side in zip(*pairs, strict=True))
    (row,) = compared(tmp_path_factory.getbasetemp(), {"w": before}, {"w": after}).tensors
    both = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    assert row.drift is not None and row.before is not None and row.after is not None
    assert row.drift.left_out == len(pairs) - len(both)
    assert row.before.nans == sum(math.isnan(x) for x, _ in pairs)
    assert row.after.infs == sum(math.isinf(y) for _, y in pairs)
    distance = math.sqrt(sum((y - x) ** 2 for x, y in both))
    assert row.drift.norm_difference == pytest.approx(distance, rel=1e-9, abs=1e-12)


def test_the_same_bytes_are_frozen_and_nothing_else_is(tmp_path: Path) -> None:
    before = {"nan": torch.tensor([math.nan, 1.0]), "zero": torch.zeros(2), "one": torch.ones(3)}
    after = {**before, "zero": -torch.zeros(2)}  # equal numbers, other bytes
    result = compared(tmp_path, before, after)
    assert {row.name: row.status for row in result.tensors} == {
        "nan": "frozen",
        "zero": "drifted",
        "one": "frozen",
    }
    assert not result.unchanged and compared(tmp_path, before, before).unchanged
    assert result.not_finite[0].name == "nan"


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    kept, moved, near = torch.randn(4, 4), torch.randn(5, 5), torch.randn(6, 6)
    zeros = {f"old.{i}.bias": torch.zeros(3) for i in range(3)}
    before = {"kept": kept, "old.w": moved, "a.old.proj": near, "half": kept, "grown": kept,
              "gone": torch.ones(9), **zeros}  # fmt: skip
    after = {"kept": kept.clone(), "new.w": moved, "a.new.proj": near + 0.01, "half": kept.half(),
             "grown": torch.ones(4, 5), "fresh": torch.tensor([math.nan]),
             **{f"new.{i}.bias": torch.zeros(3) for i in range(3)}}  # fmt: skip
    result = compared(tmp_path, before, after)
    rows = {row.name: row for row in result.tensors}
    assert {name: row.status for name, row in rows.items()} == {
        "kept": "frozen",
        "new.w": "renamed",
        "a.new.proj": "renamed",
        "half": "dtype",
        "grown": "shape",
        "fresh": "added",
        "gone": "removed",
        **{f"new.{i}.bias": "renamed" for i in range(3)},
    }
    assert (rows["new.w"].renamed_from, rows["new.w"].renamed_by) == ("old.w", "bytes")
    guess = rows["a.new.proj"]
    assert (guess.renamed_from, guess.renamed_by) == ("a.old.proj", "shape and name")
    assert guess.drift is not None and guess.drift.largest == pytest.approx(0.01, rel=1e-4)
    assert [rows[f"new.{i}.bias"].renamed_from for i in range(3)] == [
        f"old.{i}.bias" for i in range(3)
    ]
    assert rows["half"].drift is not None and 0 < (rows["half"].drift.relative or 0) < 1e-3
    assert rows["grown"].drift is None
    assert [row.name for row in result.not_finite] == ["fresh"]
    assert result.params == (sum(t.numel() for t in before.values()),
                             sum(t.numel() for t in after.values()))  # fmt: skip


def test_a_prefix_on_every_name_is_a_rename(tmp_path: Path) -> None:
    before = {f"layers.{i}.{n}.weight": torch.randn(3, 3) for i in range(4) for n in ("up", "down")}
    after = {f"model.{name}": tensor + 0.5 for name, tensor in before.items()}
    result = compared(tmp_path, before, after)
    assert {row.renamed_from for row in result.of("renamed")} == set(before)
    assert all(row.name == f"model.{row.renamed_from}" for row in result.tensors)


def test_formats_below_a_byte_are_compared_by_their_bytes(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [16], "data_offsets": [0, 8]}}).encode()
    for name, last in (("before", 0), ("same", 0), ("after", 1)):
        raw = len(header).to_bytes(8, "little") + header + bytes(7) + bytes([last])
        (tmp_path / f"{name}.safetensors").write_bytes(raw)
    first = tmp_path / "before.safetensors"
    (same,) = compare_checkpoints(first, tmp_path / "same.safetensors").tensors
    (other,) = compare_checkpoints(first, tmp_path / "after.safetensors").tensors
    assert (same.status, other.status, other.drift) == ("frozen", "drifted", None)
    assert "F4 is not decoded" in other.note


def test_a_checkpoint_of_torch_beside_one_of_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    safetensors.save_file(tensors, str(tmp_path / "m.safetensors"))
    torch.save(tensors, tmp_path / "m.pt")
    assert rt.diff(tmp_path / "m.safetensors", tmp_path / "m.pt").unchanged  # type: ignore[union-attr]


def test_no_slice_grows_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound that keeps memory small: what is read at once, of a tensor of many slices."""
    sizes: list[int] = []
    real = Stored.slices

    def watched(self: Stored) -> Any:
        for part in real(self):
            sizes.append(part.untyped_storage().nbytes())
            yield part

    monkeypatch.setattr(Stored, "slices", watched)
    x = torch.randn(5 * SLICE)
    result = compared(tmp_path, {"w": x, "old": x[:9]}, {"w": x + 1, "new": x[:9]})
    assert len(result.of("renamed")) == 1
    assert len(sizes) >= 10 and max(sizes) == SLICE * 4


CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64,
          "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def with_configs(folder: Path, before: object, after: object) -> CheckpointDiff:
    for name, config in (("a", before), ("b", after)):
        (folder / name).mkdir()
        safetensors.save_file({"w": torch.ones(2)}, str(folder / name / "model.safetensors"))
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / name / "config.json").write_text(text)
    return compare_checkpoints(folder / "a", folder / "b")


def test_what_a_config_does_to_the_parameters(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = with_configs(tmp_path, CONFIG, {**CONFIG, "n_layer": 3, "vocab_size": 65})
    assert result.config is not None and result.config.parameters is not None
    assert result.config.fields == (("n_layer", "2", "3"), ("vocab_size", "64", "65"))
    before, after = result.config.parameters.params
    block = 12 * 32 * 32 + 13 * 32  # products and biases of attention and MLP, and two norms
    assert after - before == block + 32
    rows = {row.path: row.modules for row in result.config.parameters.modules}
    assert rows["transformer.h.*.mlp.c_fc"] == (2, 3)


def test_equal_configs_and_models_that_cannot_be_built(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "same").mkdir()
    assert with_configs(tmp_path / "same", CONFIG, CONFIG).config is None
    config = with_configs(tmp_path, CONFIG, {"model_type": "no_such"}).config
    assert config is not None and config.parameters is None
    assert "no_such" in config.note


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: not a readable"):
        with_configs(tmp_path, CONFIG, "{")


@pytest.mark.parametrize(
    ("condition", "broken"),
    [
        ("drift>1%", True),
        ("drift>0.5", False),
        ("params>0", True),
        ("params>100%", False),
        ("bytes>1 KiB", False),
        ("nonfinite>0", True),
        ("changed>1", True),
        ("added>1", False),
        ("removed>0", False),
    ],
)
def test_conditions(condition: str, broken: bool, tmp_path: Path) -> None:
    before = {"w": torch.ones(4)}
    after = {"w": torch.full((4,), 1.1), "n": torch.tensor([math.inf])}
    sentences = compared(tmp_path, before, after).violations([condition])
    assert bool(sentences) == broken
    assert all(repr(condition) in sentence for sentence in sentences)


def test_a_tensor_that_was_zero_drifts_without_bound(tmp_path: Path) -> None:
    result = compared(tmp_path, {"w": torch.zeros(2)}, {"w": torch.ones(2)})
    (row,) = result.tensors
    assert row.drift is not None and row.drift.relative is None and row.drift.cosine is None
    assert result.violations(["drift>1000%"])
    json.dumps(result.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "condition", ["time>5%", "drift", "nonfinite>5%", "params>3 kB", "drift>x"]
)
def test_conditions_that_checkpoints_do_not_have(condition: str, tmp_path: Path) -> None:
    result = compared(tmp_path, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    with pytest.raises(rt.types.RequestError, match="--fail-on"):
        result.violations([condition])


def test_what_is_no_pair_of_checkpoints_is_refused(tmp_path: Path) -> None:
    before, after = written(tmp_path, {"w": torch.ones(1)}, {"w": torch.ones(1)})
    for other in ("gpt2", torch.nn.ReLU()):
        with pytest.raises(rt.types.RequestError, match="of two kinds"):
            rt.diff(before, other)
    with pytest.raises(
        rt.types.RequestError, match=r"chip, phases, batch: a checkpoint has weights"
    ):
        rt.diff(before, after, chip="l4", phases=["decode"], batch=3)
    with pytest.raises(CheckpointError, match="there is no such file"):
        rt.diff(before, tmp_path / "nope.safetensors")
