"""What moved between memory and caches in total, as counters of memory controllers tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCount:
    """The DRAM bytes of a region of code, or of a whole command, over all sockets.

    Memory controllers count what anybody moves, also other programs on the machine.
    """

    name: str  # of the region; "" for a whole command
    read: int | None  # byte; None where reads and writes were counted as one
    written: int | None  # byte; None where reads and writes were counted as one
    seconds: float | None = None  # s, of all calls; None where the file does not say
    calls: int | None = None  # how often the region ran; None where the file does not say
    together: int | None = None  # byte, read and written, where these were counted as one

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return (self.read or 0) + (self.written or 0) + (self.together or 0)


def memory_count(
    name: str,
    sides: dict[str, float],
    seconds: float | None,
    calls: int | None = None,
) -> MemoryCount | None:
    """The record of the bytes of "read" and "written", or else of "together"; None for neither.

    sides: bytes by one of these three words.  Reads without writes, or the other way, are no total.
    """
    if "read" in sides and "written" in sides:
        return MemoryCount(
            name=name,
            read=round(sides["read"]),
            written=round(sides["written"]),
            seconds=seconds,
            calls=calls,
        )
    if "together" not in sides:
        return None
    return MemoryCount(
        name=name,
        read=None,
        written=None,
        seconds=seconds,
        calls=calls,
        together=round(sides["together"]),
    )
