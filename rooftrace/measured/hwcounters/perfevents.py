"""Which events of Linux perf count DRAM traffic, and how many bytes one count is.

Sources: PMU drivers of Linux (sysfs events with their units), tools/perf/pmu-events for Intel and
AMD, and Documentation/admin-guide/perf for Alibaba.  Linux does not say how many bytes one count of
other chips is, so flux_rd of HiSilicon and cmem_rd_data of NVIDIA Grace are not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Side = Literal["read", "written", "together"]

_SIDES: dict[str, Side] = {
    **dict.fromkeys(("read", "reads", "rd", "rdcas"), "read"),
    **dict.fromkeys(("write", "writes", "wr", "wrcas", "rmw"), "written"),
    **dict.fromkeys(("total", "all"), "together"),
}

# (name of the family, pattern of its events, in small letters); one count is 64 byte in all of
# them.  <side>: read or written, and together where it is not in the pattern; <box>: the number of
# one memory controller or channel.
_FAMILIES = (
    ("imc/cas_count_*/", r"(?:uncore_)?imc(?:_(?P<box>\d+))?/cas_count_(?P<side>read|write)/"),
    ("imc/data_*/", r"(?:uncore_)?imc(?:_(?P<box>\d+))?/data_(?P<side>reads|writes)/"),
    (
        "imc_free_running/data_*/",
        r"(?:uncore_)?imc_free_running(?:_(?P<box>\d+))?/data_(?P<side>read|write|total)/",
    ),
    ("unc_m_cas_count.*", r"unc_m_cas_count(?:_sch(?P<box>\d))?\.(?P<side>rd|wr|all)"),
    ("unc_mc*_*cas_count_freerun", r"unc_mc(?P<box>\d)_(?P<side>rdcas|wrcas)_count_freerun"),
    ("llc_misses.mem_*", r"llc_misses\.mem_(?P<side>read|write)"),
    (
        "umc_cas_cmd.*",
        r"(?:amd_umc(?:_(?P<box>\d+))?/)?umc_cas_cmd\.(?P<side>rd|wr|all)/?",
    ),
    ("dram_channel_data_controller_*", r"(?:amd_df/)?dram_channel_data_controller_(?P<box>\d+)/?"),
    (
        "*_processor_*_data_beats_cs*",
        r"(?:amd_df/)?(?:local|remote)_processor_(?P<side>read|write)_data_beats_cs(?P<box>\d+)/?",
    ),
    (
        "local_or_remote_socket_*_data_beats_dram_*",
        r"(?:amd_df/)?local_or_remote_socket_(?P<side>read|write)_data_beats_dram_(?P<box>\d+)/?",
    ),
    ("ali_drw/hif_*/", r"ali_drw_(?P<box>[0-9a-f]+)/hif_(?P<side>rd|wr|rmw)/"),
)
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _FAMILIES)
_SIZE = 64

EXPECTED = (
    "uncore_imc/cas_count_read/ and cas_count_write (Intel servers), "
    "uncore_imc_free_running/data_read/ and data_write (Intel PCs), umc_cas_cmd.rd and .wr (AMD)"
)
"""The events to ask for, for errors."""

_MODIFIERS = re.compile(r"( \[[^\]]*\])|(?<=/)[a-z]+$|:[a-zA-Z]+$")
"""What perf writes behind the name of an event: a PMU in brackets, and modifiers such as :u."""


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """What an event of perf counts."""

    family: str  # events that may be added; two families count the same bytes
    side: Side
    box: str  # of which controller or channel; "" for all of them
    size: int  # byte of one count


def memory_event(name: str) -> MemoryEvent | None:
    """What an event counts by its name; None where it counts no DRAM traffic that is known."""
    plain = _MODIFIERS.sub("", name.strip()).strip().lower()
    for family, pattern in _PATTERNS:
        match = pattern.fullmatch(plain)
        if match is None:
            continue
        parts = match.groupdict()
        side = _SIDES[parts["side"]] if "side" in parts else "together"
        box = parts.get("box") or ""
        return MemoryEvent(family if box else f"{family} of all", side, box, _SIZE)
    return None
