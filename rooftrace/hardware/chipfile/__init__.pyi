from rooftrace.hardware.chipfile.linting import lint_chip as lint_chip
from rooftrace.hardware.chipfile.reading import (
    ChipFileError as ChipFileError,
    available_chips as available_chips,
    chips_called as chips_called,
    load_chip as load_chip,
)
from rooftrace.hardware.chipfile.writing import dump_chip as dump_chip
