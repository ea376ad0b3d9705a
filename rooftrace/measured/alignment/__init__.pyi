from rooftrace.measured.alignment import compiled as compiled, keys as keys, pairing as pairing
from rooftrace.measured.alignment.aligning import align as align
from rooftrace.measured.alignment.alignment import (
    Alignment as Alignment,
    Stray as Stray,
    counted as counted,
)
from rooftrace.measured.alignment.compiled import KernelTime as KernelTime
from rooftrace.measured.alignment.compiled_steps import FusedStep as FusedStep, fused as fused
from rooftrace.measured.alignment.naming import is_compiled as is_compiled
from rooftrace.measured.alignment.pairing import (
    Graphs as Graphs,
    MeasuredStep as MeasuredStep,
    read_measured as read_measured,
    steps_of as steps_of,
)
from rooftrace.measured.alignment.stepcalls import kernel_times as kernel_times
