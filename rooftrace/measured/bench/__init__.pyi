from rooftrace.measured.bench.bench import (
    Bench as Bench,
    MeasureError as MeasureError,
    Progress as Progress,
    checked_device as checked_device,
    default_device as default_device,
    direct_dispatch as direct_dispatch,
    eager_dispatch as eager_dispatch,
    float32_precision as float32_precision,
    graph_of_tiny_kernels as graph_of_tiny_kernels,
    pinned_threads as pinned_threads,
    stream_of_tiny_kernels as stream_of_tiny_kernels,
)
from rooftrace.measured.bench.chip_peaks import (
    measure_chip as measure_chip,
    slug as slug,
)
from rooftrace.measured.bench.environment import (
    IDENTITY as IDENTITY,
    clocks as clocks,
    device_facts as device_facts,
    load_note as load_note,
    versions as versions,
)
from rooftrace.measured.bench.measure_step import (
    measure as measure,
    measured_row as measured_row,
    measuring as measuring,
    row_key as row_key,
)
from rooftrace.measured.bench.realize import (
    realized as realized,
)
from rooftrace.measured.bench.realsteps import (
    Profile as Profile,
    RealStep as RealStep,
    by_op as by_op,
    profiled as profiled,
    real_inputs as real_inputs,
    real_step as real_step,
    timed as timed,
)
from rooftrace.measured.bench.runfile import (
    MicroRow as MicroRow,
    ModelRow as ModelRow,
    OpTime as OpTime,
    Run as Run,
    RunFileError as RunFileError,
    Trouble as Trouble,
    load_run as load_run,
    save_run as save_run,
)
