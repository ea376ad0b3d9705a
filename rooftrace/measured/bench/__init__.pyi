from rooftrace.measured.bench import devices as devices, launches as launches
from rooftrace.measured.bench.chip_peaks import (
    measure_chip as measure_chip,
)
from rooftrace.measured.bench.clock import (
    Bench as Bench,
    MeasureError as MeasureError,
)
from rooftrace.measured.bench.threads import (
    pinned_threads as pinned_threads,
)
