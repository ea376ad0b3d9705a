"""What comes with rooftrace, as tables: a line for each chip or each system."""

from __future__ import annotations

from typing import Literal

from rooftrace.reporting.text.chips import chip_list
from rooftrace.reporting.text.systems import system_list
from rooftrace.reporting.view import model as view


def list_of(what: Literal["chips", "systems"]) -> view.View:
    """The table of all chips, or of all systems."""
    return chip_list() if what == "chips" else system_list()
