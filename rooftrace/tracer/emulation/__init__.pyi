from rooftrace.tracer.emulation import handles as handles
from rooftrace.tracer.emulation.entering import (
    emulate as emulate,
)
from rooftrace.tracer.emulation.facts import Device as Device
from rooftrace.tracer.emulation.refused import (
    DeviceError as DeviceError,
)
from rooftrace.tracer.emulation.state import (
    Clock as Clock,
    Meter as Meter,
)
