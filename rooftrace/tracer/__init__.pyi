from rooftrace.tracer import torch_private as torch_private
from rooftrace.tracer.api import (
    capture as capture,
    load as load,
    only as only,
    save as save,
    trace as trace,
    trace_target as trace_target,
)
