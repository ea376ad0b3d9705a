"""Times collectives of gloo between processes of this machine, and writes them as a CSV.

A trial of the calibration of collectives without GPUs: on several GPUs, nccl-tests measure.
"""

from __future__ import annotations

import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from rooftrace._outputs import check_output
from rooftrace._processes import safe_path
from rooftrace._writing import write_bytes
from rooftrace.errors import RequestError
from rooftrace.measured.bench.clock import MeasureError

SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Bytes of a buffer: 1 KiB to 16 MiB."""
REPEATS = 7
GlooRow = tuple[str, str, int, int, float]


def measure_collectives(
    ranks: int,
    out: str | os.PathLike[str],
    *,
    sizes: Sequence[int] = SIZES,
    timeout: float = 300.0,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Time collectives between `ranks` processes of this machine; the number of rows in `out`.

    Raises RequestError for fewer than two ranks, and MeasureError where a process fails or the
    time is over.
    """
    if ranks < 2:
        raise RequestError(f"ranks={ranks}: expected 2 or more, each a process of this machine")
    lines = ["op,dtype,ranks,bytes,seconds,library"]
    check_output(Path(out), f"{lines[0]}\n".encode())
    rows = _run(ranks, tuple(sizes), timeout, tell)
    lines += [f"{op},{dtype},{n},{size},{s:.9g},gloo" for op, dtype, n, size, s in rows]
    write_bytes(Path(out), ("\n".join(lines) + "\n").encode())
    return len(rows)


def _run(
    ranks: int, sizes: tuple[int, ...], timeout: float, tell: Callable[[str], None]
) -> list[GlooRow]:
    """Start the processes, and wait for the rows of the first."""
    context = processes.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, safe_path():
        answers: Any = context.Queue()
        store = str(Path(folder) / "store")
        workers = [
            context.Process(target=_work, args=(rank, ranks, store, sizes, answers), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        tell(f"{ranks} processes measure {len(sizes)} sizes")
        try:
            rows = _first_answer(answers, workers, time.monotonic() + timeout)
        finally:
            for worker in workers:
                worker.join(5)
                if worker.is_alive():
                    worker.kill()
    return rows


def _first_answer(answers: Any, workers: Sequence[Any], end: float) -> list[GlooRow]:
    while time.monotonic() < end:
        try:
            answer = answers.get(timeout=0.5)
        except queue.Empty:
            failed = [n for n, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
            if failed:
                code = workers[failed[0]].exitcode
                raise MeasureError(
                    f"rank {failed[0]} of {len(workers)} ended with exit code {code}; try fewer "
                    "--ranks, and see its message above"
                ) from None
            continue
        if isinstance(answer, str):
            raise MeasureError(f"gloo failed: {answer}")
        return list(answer)
    raise MeasureError(
        f"{len(workers)} processes did not come to an end in time; try fewer --ranks"
    )


def _work(rank: int, ranks: int, store: str, sizes: tuple[int, ...], answers: Any) -> None:
    """One process: joins the group, times every op, and the first of them answers."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        rows = time_ops(rank, ranks, sizes)
        dist.barrier()
        dist.destroy_process_group()
    except (RuntimeError, ValueError) as error:
        answers.put(str(error).splitlines()[0])
        return
    if rank == 0:
        answers.put(rows)


def time_ops(rank: int, ranks: int, sizes: Sequence[int]) -> list[GlooRow]:
    """(op, dtype, ranks, bytes, seconds) of each op and size, in the current process group."""
    rows: list[GlooRow] = []
    for size in sizes:
        count = max(ranks, size // 4 // ranks * ranks)
        buffer, part = torch.zeros(count), torch.zeros(count // ranks)
        parts = list(buffer.chunk(ranks))
        ops: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, buffer),
            "all_gather": partial(dist.all_gather, parts, part),
            "broadcast": partial(dist.broadcast, buffer, 0),
            "send": partial(_pass_on, rank, buffer),
        }
        for op, call in ops.items():
            if op != "send" or ranks > 1:
                rows.append((op, "float", ranks, count * 4, _median(call)))
    return rows


def _pass_on(rank: int, buffer: torch.Tensor) -> None:
    """The first rank sends to the second."""
    if rank == 0:
        dist.send(buffer, 1)
    elif rank == 1:
        dist.recv(buffer, 0)


def _median(call: Callable[[], object]) -> float:
    """Median seconds of a call, each after a barrier."""
    seconds = []
    for repeat in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        if repeat:  # the first opens connections
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
