"""The sections of report.md: each is a function from a report to lines of markdown."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
