"""`python -m rooftrace`."""

from rooftrace.reporting.cli import main

main()
