"""Keeps the threads of torch's pool on cores of their own while a CPU is measured."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def pinned_threads() -> Iterator[bool]:
    """Keep each thread of torch's pool on a core of its own, on Linux; yields whether it did.

    A scheduler may stack two of them on one core for seconds, where each waits for the other's time
    slice: a copy was seen to take 1.7 ms or 8 ms by that alone. All masks are restored afterwards.
    """
    import torch

    tasks = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not tasks.is_dir():
        yield False
        return
    idle = _processor_ticks(tasks)
    example = torch.ones(2**20)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        example.add_(1)
    busy = _processor_ticks(tasks)
    ours = threading.get_native_id()
    allowed = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    for thread in (int(item.name) for item in tasks.iterdir()):
        with contextlib.suppress(OSError):  # it may have ended
            before[thread] = os.sched_getaffinity(thread)
    cores = spread_cores(allowed)
    # The pool's threads are the ones that just worked; others (of a progress bar, say) come last.
    others = [thread for thread in before if thread != ours]
    others.sort(key=lambda thread: idle.get(thread, 0) - busy.get(thread, 0))
    workers = [ours, *others]
    try:
        for position, thread in enumerate(workers):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, {cores[position % len(cores)]})
        yield True
    finally:
        for thread in (int(item.name) for item in tasks.iterdir()):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, allowed))


def _processor_ticks(tasks: Path) -> dict[int, int]:
    """Processor time that each thread of this process has used so far, in clock ticks."""
    ticks = {}
    for item in tasks.iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # man proc_pid_stat: utime and stime are fields 14 and 15; the name (2) may hold spaces
            after_name = (item / "stat").read_text().rpartition(")")[2].split()
            ticks[int(item.name)] = int(after_name[11]) + int(after_name[12])
    return ticks


def spread_cores(allowed: set[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The allowed CPUs, one of each physical core first, then their hyperthread siblings."""
    seen: dict[str, int] = {}
    order = []
    for cpu in sorted(allowed):
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        order.append((seen.get(siblings, 0), cpu))
        seen[siblings] = seen.get(siblings, 0) + 1
    return [cpu for _, cpu in sorted(order)]
