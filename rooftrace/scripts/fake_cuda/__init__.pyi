from rooftrace.scripts.fake_cuda import state as state
from rooftrace.scripts.fake_cuda.entering import emulate as emulate
from rooftrace.scripts.fake_cuda.state import Device as Device, DeviceError as DeviceError
