from rooftrace.measured.hwcounters.likwid import (
    read_likwid as read_likwid,
)
from rooftrace.measured.hwcounters.memorycount import (
    MemoryCount as MemoryCount,
)
from rooftrace.measured.hwcounters.perfstat import (
    is_perf_stat as is_perf_stat,
    read_perf_stat as read_perf_stat,
)
from rooftrace.measured.hwcounters.rocprof import (
    read_rocprof as read_rocprof,
)
