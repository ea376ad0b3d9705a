"""The sections of report.md: each is a function from a report to lines of markdown."""
