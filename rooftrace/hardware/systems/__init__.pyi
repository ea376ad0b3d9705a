from rooftrace.hardware.systems import records as records
from rooftrace.hardware.systems.linting import lint_system as lint_system
from rooftrace.hardware.systems.reading import (
    available_systems as available_systems,
    load_system as load_system,
)
from rooftrace.hardware.systems.records import System as System
from rooftrace.hardware.systems.writing import dump_system as dump_system
