"""What large steps and files take on a terminal: seconds, memory, silence, and Ctrl-C.

    python benchmarks/large/large.py [--stops 20] [NAME ...]

Each command runs once to its end, on a terminal that this script is, and is then stopped at moments
drawn over that time.  Prints the table of docs/limits.md.  Needs Linux and 8 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import random
import select
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "examples" / "configs" / "qwen3-235b-a22b.json"
COMMANDS = {
    "500,000 ops": "trace models.py:flat --phase forward -o flat.json.gz",
    "500,000 ops that repeat": "trace models.py:periodic --phase forward -o periodic.json.gz",
    "the saved graph of 500,000 ops": "report flat.json.gz",
    "a config of 100 layers x 512 experts": "report config.json --phase prefill --seq 1024",
    "lists of 100 x 512 experts, 563,700 ops": "report models.py:experts --phase forward",
    "a trace of 1.5 GB": "validate trace.json --chip h100-sxm --target models.py:encoder",
}


@dataclass
class Ended:
    """How a command ended."""

    code: int
    seconds: float
    peak: int = 0  # bytes of it and its children
    silence: float = 0.0  # the longest time in which nothing was shown
    after: float = 0.0  # seconds from Ctrl-C to the end
    said: str = ""


def family(pid: int) -> Iterator[int]:
    """A process and those below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def resident(pid: int) -> int:
    total = 0
    try:
        for each in family(pid):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    except (OSError, IndexError):  # one has just ended
        pass
    return total * os.sysconf("SC_PAGE_SIZE")


def ran(words: list[str], stop_at: float | None = None) -> Ended:
    """Run a command on a terminal; stop_at: seconds after which Ctrl-C is pressed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rooftrace", *words])
    begin = last = time.monotonic()
    peak, silence, stopped, said = 0, 0.0, 0.0, b""
    while True:
        now = time.monotonic()
        if stop_at is not None and not stopped and now - begin > stop_at:
            os.write(terminal, b"\x03")
            stopped, said = now, b""
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                block = os.read(terminal, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not block:
                break
            silence, last = max(silence, time.monotonic() - last), time.monotonic()
            said += block
        peak = max(peak, resident(pid))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    end = time.monotonic()
    after = end - stopped if stopped else 0.0
    return Ended(code, end - begin, peak, silence, after, said.decode(errors="replace"))


def write_trace(path: Path, size: int) -> None:
    """A trace of so many bytes: steps of torch.profiler, one after the other."""
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    x, small = torch.ones(4, 16, 64), path.with_name("small.json")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=3),
        on_trace_ready=lambda done: done.export_chrome_trace(str(small)),
    ) as profiler:
        for _ in range(4):
            model(x)
            profiler.step()
    data = json.loads(small.read_text())
    events = data.pop("traceEvents")
    timed = [event for event in events if event.get("ph") == "X"]
    length = max(e["ts"] + e["dur"] for e in timed) - min(e["ts"] for e in timed) + 10
    with path.open("w") as file:
        file.write(json.dumps(data)[:-1] + ', "traceEvents": [')
        file.write(",\n".join(json.dumps(e) for e in events if e.get("ph") != "X"))
        turn = 0
        while file.tell() < size:
            for event in timed:
                name, mark, number = event["name"].partition("#")
                later = {**event, "ts": event["ts"] + turn * length}
                if name == "ProfilerStep" and mark:
                    later["name"] = f"{name}#{int(number) + 3 * turn}"
                file.write(",\n" + json.dumps(later))
            turn += 1
        file.write("]}")


def make_inputs(names: list[str]) -> None:
    shutil.copy(HERE / "models.py", "models.py")
    config = json.loads(CONFIG.read_text())
    config |= {"num_hidden_layers": 100, "num_experts": 512}
    Path("config.json").write_text(json.dumps(config))
    if any("trace of" in name for name in names):
        write_trace(Path("trace.json"), 1_500_000_000)
    if "the saved graph of 500,000 ops" in names and not Path("flat.json.gz").exists():
        assert ran(COMMANDS["500,000 ops"].split()).code == 0


def row_of(name: str, stops: int) -> str:
    words = COMMANDS[name].split()
    whole = ran(words)
    assert whole.code == 0, whole.said[-2000:]
    before = set(Path().iterdir())
    draw = random.Random(name)
    ends = [ran(words, draw.uniform(0, 0.95 * whole.seconds)) for _ in range(stops)]
    for end in ends:  # a run that was done before its moment is none that was stopped
        assert (end.code == 130 and "Traceback" not in end.said) or end.code == 0, end
    assert set(Path().iterdir()) == before
    slowest = max((end.after for end in ends if end.code == 130), default=0.0)
    return (
        f"| {name} | `{words[0]}` | {whole.seconds:.0f} s | {whole.peak / 1e9:.1f} GB | "
        f"{whole.silence:.1f} s | {slowest:.1f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--stops", type=int, default=20)
    asked = parser.parse_args()
    unknown = set(asked.names) - set(COMMANDS)
    if unknown:
        parser.error(f"{sorted(unknown)}: expected some of {list(COMMANDS)}")
    os.environ |= {"ROOFTRACE_CACHE": "off", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_inputs(asked.names)
        print("| What | Command | Time | Peak memory | Longest silence | Ctrl-C to the end |")
        print("|---|---|---|---|---|---|")
        for name in asked.names:
            print(row_of(name, asked.stops), flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
