"""`rooftrace`, and `python -m rooftrace`."""

import os
import sys


def main() -> None:
    """Run the command line.  A stop while it is still loading ends as one that comes later."""
    try:
        from rooftrace.reporting.cli import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("rooftrace: stopped\n")
        sys.stderr.flush()
        os._exit(130)


if __name__ == "__main__":
    main()
