from rooftrace.tracer.fake_cuda import state as state
from rooftrace.tracer.fake_cuda.entering import emulate as emulate
from rooftrace.tracer.fake_cuda.state import Device as Device, DeviceError as DeviceError
