from rooftrace.measured.fused import compiled as compiled
from rooftrace.measured.fused.kerneltimes import (
    KernelTime as KernelTime,
)
from rooftrace.measured.fused.naming import (
    is_compiled as is_compiled,
)
from rooftrace.measured.fused.steps import (
    FusedStep as FusedStep,
    fused as fused,
)
from rooftrace.measured.fused.timing import (
    kernel_times as kernel_times,
)
