from rooftrace.hardware.systems import records as records
from rooftrace.hardware.systems.reading import (
    available_systems as available_systems,
    dump_system as dump_system,
    lint_system as lint_system,
    load_system as load_system,
)
from rooftrace.hardware.systems.records import System as System
