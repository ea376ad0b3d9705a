"""Chips as data: units, number formats, and sourced facts. Needs the standard library only.

The function `precision.precision` is not re-exported: its name here is that of its module.
"""

from rooftrace.hardware.chip import Chip, Fact, Link, MissingPeakError, Peak
from rooftrace.hardware.chipfile import (
    ChipFileError,
    Finding,
    UnknownChipError,
    available_chips,
    dump_chip,
    lint_chip,
    load_chip,
    write_chip,
)
from rooftrace.hardware.precision import (
    PRECISIONS,
    Precision,
    PrecisionError,
    bytes_per_element,
    compute_family,
    storage_bytes,
    widest,
)
from rooftrace.hardware.units import UnitError

__all__ = [
    "PRECISIONS",
    "Chip",
    "ChipFileError",
    "Fact",
    "Finding",
    "Link",
    "MissingPeakError",
    "Peak",
    "Precision",
    "PrecisionError",
    "UnitError",
    "UnknownChipError",
    "available_chips",
    "bytes_per_element",
    "compute_family",
    "dump_chip",
    "lint_chip",
    "load_chip",
    "storage_bytes",
    "widest",
    "write_chip",
]
