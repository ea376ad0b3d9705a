from rooftrace.hardware.chipfile.linting import lint_chip as lint_chip
from rooftrace.hardware.chipfile.reading import (
    ChipFileError as ChipFileError,
    available_chips as available_chips,
    load_chip as load_chip,
)
from rooftrace.hardware.chipfile.writing import dump_chip as dump_chip, write_chip as write_chip
