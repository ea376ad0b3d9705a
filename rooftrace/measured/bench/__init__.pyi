from rooftrace.measured.bench import (
    machine as machine,
    measurement as measurement,
    runfile as runfile,
)
from rooftrace.measured.bench.clock import (
    Bench as Bench,
    MeasureError as MeasureError,
    pinned_threads as pinned_threads,
)
from rooftrace.measured.bench.gloo import (
    measure_collectives as measure_collectives,
    time_ops as time_ops,
)
from rooftrace.measured.bench.machine import measure_chip as measure_chip
from rooftrace.measured.bench.measurement import (
    measure as measure,
    measured_target as measured_target,
    measuring as measuring,
)
from rooftrace.measured.bench.models import traced_model as traced_model
from rooftrace.measured.bench.operations import traced_micro as traced_micro
from rooftrace.measured.bench.runfile import (
    MicroRow as MicroRow,
    ModelRow as ModelRow,
    OpTime as OpTime,
    Run as Run,
)
from rooftrace.measured.bench.session import SuitePlan as SuitePlan, start_again as start_again
from rooftrace.measured.bench.steps import profiler as profiler
from rooftrace.measured.bench.suite import measure_suite as measure_suite, summary as summary
