"""Remarks of a lint on a file of facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One remark of a lint. A note asks for nothing; a warning wants a second look."""

    severity: Severity
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.message}"
