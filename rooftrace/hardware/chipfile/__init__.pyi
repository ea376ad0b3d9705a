from rooftrace.hardware.chipfile.linting import (
    Finding as Finding,
    lint_chip as lint_chip,
    lint_spelling as lint_spelling,
)
from rooftrace.hardware.chipfile.reading import (
    ChipFileError as ChipFileError,
    available_chips as available_chips,
    chips_called as chips_called,
    dump_chip as dump_chip,
    load_chip as load_chip,
)
from rooftrace.hardware.chipfile.tables import (
    FactFileError as FactFileError,
    FactTable as FactTable,
    bundled_files as bundled_files,
    bundled_name as bundled_name,
    fact_rows as fact_rows,
    spelling as spelling,
    toml_sections as toml_sections,
)
