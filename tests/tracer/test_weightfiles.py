"""Files of weights: safetensors and torch.save, read slice by slice; what is no such file."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from rooftrace.tracer.names import is_checkpoint
from rooftrace.tracer.targets import CheckpointError, open_checkpoint
from rooftrace.tracer.targets.checkpoints import SLICE, Stored, flat_slice, ranges

pytestmark = pytest.mark.quick

safetensors = pytest.importorskip("safetensors.torch")

FLOATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
WHOLE = {
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}


def of_every_kind() -> dict[str, Tensor]:
    tensors = {name: torch.randn(7, 5).to(dtype) for dtype, name in FLOATS.items()}
    tensors |= {name: torch.randint(0, 2, (3, 4)).to(dtype) for dtype, name in WHOLE.items()}
    tensors["complex64"] = torch.randn(6, dtype=torch.complex64)
    tensors["empty"] = torch.empty(0, 3)
    tensors["scalar"] = torch.tensor(2.5)
    return tensors


def values_of(stored: Stored) -> Tensor:
    parts = list(stored.slices())
    return torch.cat(parts).reshape(stored.shape) if parts else torch.empty(stored.shape)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("write", [safetensors.save_file, torch.save])
def test_every_dtype_is_read_as_the_library_reads_it(
    write: Callable[[Any, str], None], tmp_path: Path
) -> None:
    path = tmp_path / ("w.safetensors" if write is safetensors.save_file else "w.pt")
    tensors = of_every_kind()
    write(tensors, str(path))
    read = open_checkpoint(path)
    assert read.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = read.tensors[name]
        assert (stored.shape, stored.elements) == (tuple(tensor.shape), tensor.numel())
        assert stored.bytes == tensor.numel() * tensor.element_size()
        assert bits(values_of(stored)) == bits(tensor), name
        if name not in ("empty", "scalar"):
            assert stored.dtype == name
    assert read.bytes == sum(t.numel() * t.element_size() for t in tensors.values())


def test_containers_give_paths_and_what_is_no_tensor_is_told(tmp_path: Path) -> None:
    path = tmp_path / "state.pth"
    model = {"w": torch.ones(2)}
    torch.save({"model": model, "epoch": 3, "states": [{"m": torch.ones(3)}, None]}, path)
    read = open_checkpoint(path)
    assert list(read.tensors) == ["model.w", "states.0.m"]
    assert read.notes == ("state.pth: 2 values beside the tensors: not read",)


def test_tensors_with_strides_of_their_own_and_sparse_ones(tmp_path: Path) -> None:
    path = tmp_path / "s.pt"
    base = torch.randn(6, 8)
    views = {
        "t": base.t(),
        "cut": base[1:5, ::3],
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "fp8": base.to(torch.float8_e4m3fn).t(),
    }
    torch.save({**views, "sparse": torch.eye(3).to_sparse()}, path)
    read = open_checkpoint(path)
    for name, view in views.items():
        assert bits(values_of(read.tensors[name])) == bits(view), name
    assert read.tensors["sparse.values"].elements == 3
    assert read.tensors["sparse.indices"].elements == 2 * 3


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    order=st.permutations(range(4)),
    size=st.integers(1, 9),
)
@settings(max_examples=60)
def test_slices_of_any_strides_are_the_elements_in_their_order(
    shape: list[int], order: list[int], size: int
) -> None:
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    tensor = whole.permute([i for i in order if i < len(shape)])
    parts = [flat_slice(tensor, a, b) for a, b in ranges(tensor.numel(), size)]
    assert all(part.numel() <= size for part in parts)
    assert [x for part in parts for x in part.tolist()] == tensor.reshape(-1).tolist()


@pytest.mark.parametrize("end", [".safetensors", ".pt"])
def test_no_more_than_a_slice_is_read_at_once(end: str, tmp_path: Path) -> None:
    path, tensor = tmp_path / f"w{end}", torch.randn(3 * SLICE + 7)
    save = safetensors.save_file if end == ".safetensors" else torch.save
    save({"w": tensor}, str(path))
    stored = open_checkpoint(path).tensors["w"]
    parts = list(stored.slices())
    assert [part.numel() for part in parts] == [SLICE, SLICE, SLICE, 7]
    for part in parts:  # copies of their own: a slice keeps nothing else alive
        assert part.untyped_storage().nbytes() == part.numel() * 4
    assert torch.equal(torch.cat(parts), tensor)


# -- folders and indexes ---------------------------------------------------------------------------


def sharded(folder: Path, end: str) -> Path:
    folder.mkdir(exist_ok=True)
    save = safetensors.save_file if end == ".safetensors" else torch.save
    save({"a": torch.ones(2), "b": torch.zeros(3)}, str(folder / f"model-1{end}"))
    save({"c": torch.ones(4)}, str(folder / f"model-2{end}"))
    stem = "model" if end == ".safetensors" else "pytorch_model"
    index = folder / f"{stem}{end}.index.json"
    names = {"a": f"model-1{end}", "b": f"model-1{end}", "c": f"model-2{end}"}
    index.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": names}))
    return index


@pytest.mark.parametrize("end", [".safetensors", ".bin"])
def test_a_folder_and_its_index_are_the_same_checkpoint(end: str, tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", end)
    for source in (index, index.parent, str(index.parent)):
        read = open_checkpoint(source)
        assert sorted(read.tensors) == ["a", "b", "c"] and read.files == 2
        assert (read.params, read.bytes) == (9, 36)


def test_which_paths_name_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_args.bin").write_bytes(b"")
    names = ("a.safetensors", "a.safetensors.index.json", "b.bin.index.json", "b.pt", "c.ckpt")
    assert all(is_checkpoint(name) for name in names)
    others = ("gpt2", "config.json", "t.py:build", "graph.json.gz", "hf:org/name", str(tmp_path), 3)
    assert not any(is_checkpoint(other) for other in others)
    assert is_checkpoint(sharded(tmp_path, ".safetensors").parent)


def test_a_folder_with_several_checkpoints_asks_which(tmp_path: Path) -> None:
    for name in ("one", "two"):
        safetensors.save_file({"a": torch.ones(1)}, str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(
        CheckpointError, match=r"2 checkpoints \(one.safetensors, two.safetensors\)"
    ):
        open_checkpoint(tmp_path)


# -- what is no checkpoint -------------------------------------------------------------------------

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header: object, buffer: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + buffer


BAD_SAFETENSORS = {
    "it has 0 bytes": b"",
    "header should have": file_of({"a": F32})[:30],
    "are not in 5": file_of({"a": F32})[:-3],
    "not a readable checkpoint": file_of(b"{'a': 1}"),
    "its header is no table": file_of([1]),
    "'b' overlap": file_of({"a": F32, "b": {**F32, "shape": [1], "data_offsets": [4, 8]}}),
    "have 4 bytes between them": file_of({"a": {**F32, "shape": [1], "data_offsets": [4, 8]}}),
    "'its end' have 8": file_of({"a": F32}, bytes(16)),
    "are not in 8": file_of({"a": {**F32, "shape": [4], "data_offsets": [0, 16]}}),
    "8 to 0 are not": file_of({"a": {**F32, "data_offsets": [8, 0]}}),
    "takes 12 bytes, and has 8": file_of({"a": {**F32, "shape": [3]}}),
    "cannot be": file_of({"a": {**F32, "shape": [-1, -2]}}),
    "unknown dtype 'F33'.*did you mean 'F32'": file_of({"a": {**F32, "dtype": "F33"}}),
    "the key 'a' stands twice": file_of(b'{"a": %b, "a": %b}' % ((json.dumps(F32).encode(),) * 2)),
    "a.shape='x': expected a list": file_of({"a": {**F32, "shape": "x"}}),
    "shape is missing": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "__metadata__.k=1: expected a text": file_of({"__metadata__": {"k": 1}, "a": F32}),
    "unknown key 'more'": file_of({"a": {**F32, "more": 1}}),
    "more than 64 bits": file_of({"a": {**F32, "shape": [10**30]}}),
    "deep": file_of(b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}"),
}


@pytest.mark.parametrize("message", BAD_SAFETENSORS)
def test_a_damaged_safetensors_file_is_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(BAD_SAFETENSORS[message])
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_sizes_below_a_byte_are_known_and_their_values_not(tmp_path: Path) -> None:
    path = tmp_path / "f4.safetensors"
    path.write_bytes(file_of({"a": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}))
    stored = open_checkpoint(path).tensors["a"]
    assert (stored.dtype, stored.elements, stored.bytes, stored.decoded) == ("F4", 16, 8, False)


@given(data=st.data())
@settings(max_examples=200)
def test_what_is_accepted_the_library_accepts_too(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.int16)}
    raw = bytearray(safetensors.save(tensors))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(
            st.sampled_from(b'0123459"{}[],F6')
        )
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(raw)
    try:
        ours = {name: values_of(t) for name, t in open_checkpoint(path).tensors.items()}
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    theirs = safetensors.load(bytes(raw))
    assert ours.keys() == theirs.keys()
    assert all(bits(ours[name]) == bits(theirs[name]) for name in ours)


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.mark}",))


def test_code_in_a_pickle_never_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"a": Evil(mark)}, tmp_path / "new.pt")
    torch.save({"a": Evil(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Evil(mark)))
    for name, message in (
        ("new.pt", r"it holds (posix|nt)\.system"),
        ("old.pt", "it is a pickle, which may run code"),
        ("plain.bin", "it is a pickle, which may run code"),
    ):
        with pytest.raises(CheckpointError, match=message) as raised:
            open_checkpoint(tmp_path / name)
        assert "\n" not in str(raised.value)
    assert not mark.exists()


def test_other_archives_and_cut_ones_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.pt"
    torch.save({"a": torch.ones(100)}, good)
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-200])
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("x/readme", "")
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
        for entry in old.infolist():
            packed.writestr(entry.filename, old.read(entry), zipfile.ZIP_DEFLATED)
    for name, message in {
        "cut": "no zip, or it is cut off",
        "empty": "it is empty",
        "script": "TorchScript",
        "other": "without data.pkl",
        "packed": "compressed",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / f"{name}.pt")


@given(data=st.data())
@settings(max_examples=100)
def test_a_mutated_torch_file_is_read_or_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.pt"
    torch.save({"a": torch.arange(3.0), "b": [torch.ones(2, 2)]}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        for stored in open_checkpoint(path).tensors.values():
            stored.digest()
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_an_index_reaches_files_of_its_folder_alone(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", ".safetensors")
    outside = tmp_path / "outside.safetensors"
    safetensors.save_file({"a": torch.ones(2)}, str(outside))
    for names, message in (
        ({"a": "../outside.safetensors"}, "not in the folder"),
        ({"a": str(outside)}, "not in the folder"),
        ({"a": "..\\outside.safetensors"}, "not in the folder"),
        ({"a": "model-9.safetensors"}, "there is no shard 'model-9.safetensors'"),
        ({"a": "index.json"}, "expected a file of weights"),
        ({"a": ""}, "not in the folder"),
        ({"zz": "model-1.safetensors", "y": "model-1.safetensors"}, "lacks 'zz' and 1 more"),
        ({"a": 3}, "weight_map.a=3: expected a text"),
        (None, "weight_map=None"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(index)


def test_tensors_that_an_index_leaves_out_are_told(tmp_path: Path) -> None:
    index = sharded(tmp_path / "m", ".safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    read = open_checkpoint(index)
    assert list(read.tensors) == ["a"]
    assert read.notes == ("model-1.safetensors: 1 tensor that the index leaves out: not read",)


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors.save_file({"a": torch.ones(8)}, str(path))
    stored = open_checkpoint(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="became shorter"):
        list(stored.slices())
