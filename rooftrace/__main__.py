"""`python -m rooftrace`."""

from rooftrace.reporting.cli import run

run()
