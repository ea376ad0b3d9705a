"""How much memory and time it takes to compare two sharded checkpoints of so many GB.

Writes a pair of random bf16 and fp32 shards into a folder, compares them by `rooftrace diff` in a
process of its own, samples what that process holds (Linux), and removes the pair.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def write_pair(folder: Path, size: int, form: str, largest: int) -> tuple[Path, Path]:
    """Two checkpoints of `size` bytes each in shards of at most 1 GB; a quarter of them is equal.

    largest: bytes of the largest tensor.
    """
    import torch

    pair = folder / "before", folder / "after"
    dtypes = (torch.bfloat16, torch.float32)
    shards = max(1, size // 1_000_000_000)
    maps: tuple[dict[str, str], dict[str, str]] = ({}, {})
    end = ".safetensors" if form == "safetensors" else ".bin"
    for shard in range(shards):
        left, number = size // shards, 0
        tensors: dict[str, torch.Tensor] = {}
        while left > 0:
            dtype = dtypes[number % 2]
            rows = max(1, min(left, largest) // (2048 * dtype.itemsize))
            tensors[f"layers.{shard}.{number}.weight"] = torch.randn(rows, 2048).to(dtype)
            left -= rows * 2048 * dtype.itemsize
            number += 1
        for side, (place, names) in enumerate(zip(pair, maps, strict=True)):
            place.mkdir(parents=True, exist_ok=True)
            file = f"model-{shard:05}{end}"
            if side:
                for name in list(tensors)[len(tensors) // 4 :]:
                    tensors[name].mul_(1.01)
            _write(tensors, place / file)
            names.update(dict.fromkeys(tensors, file))
    index = (
        "model.safetensors.index.json" if end == ".safetensors" else "pytorch_model.bin.index.json"
    )
    for place, names in zip(pair, maps, strict=True):
        (place / index).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return pair


def _write(tensors: dict, path: Path) -> None:
    if path.suffix == ".bin":
        import torch

        torch.save(tensors, path)
        return
    from safetensors.torch import save_file

    save_file(tensors, path)


def compared(pair: tuple[Path, Path]) -> tuple[dict[str, int], float]:
    """Peaks of what the process held, in KiB, and seconds."""
    command = [sys.executable, "-m", "rooftrace", "diff", *map(str, pair), "--format", "json"]
    start = time.monotonic()
    with open(pair[0].parent / "diff.json", "wb") as out:
        child = subprocess.Popen(command, stdout=out)
        peaks: dict[str, int] = {}
        while child.poll() is None:
            for name, size in _held(child.pid).items():
                peaks[name] = max(peaks.get(name, 0), size)
            time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"rooftrace diff ended with {child.returncode}")
    return peaks, time.monotonic() - start


def _held(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    wanted = ("VmHWM", "RssAnon", "RssFile")
    pairs = (line.split(":", 1) for line in lines if line.startswith(wanted))
    return {name: int(text.split()[0]) for name, text in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pair is written; it is removed again")
    parser.add_argument("--gb", type=float, default=5.0, help="of each checkpoint")
    parser.add_argument("--largest", type=float, default=0.25, help="GB of the largest tensor")
    parser.add_argument("--form", choices=["safetensors", "torch"], default="safetensors")
    asked = parser.parse_args()
    folder = asked.folder / f"checkpoints-{os.getpid()}"
    try:
        pair = write_pair(folder, int(asked.gb * 1e9), asked.form, int(asked.largest * 1e9))
        size = sum(file.stat().st_size for file in pair[0].iterdir())
        peaks, seconds = compared(pair)
        counts = json.loads((folder / "diff.json").read_text())["counts"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"two {asked.form} checkpoints of {size / 1e9:.2f} GB: {seconds:.1f} s, {counts}")
    for name, about in (
        ("VmHWM", "all of it, with pages of files"),
        ("RssAnon", "without pages of files"),
        ("RssFile", "pages of files: libraries, and what is mapped"),
    ):
        print(f"  {name:<8} {peaks.get(name, 0) / 1024:7.1f} MiB  {about}")


if __name__ == "__main__":
    main()
