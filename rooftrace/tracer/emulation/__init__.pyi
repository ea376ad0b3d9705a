from rooftrace.tracer.emulation.entering import (
    emulated as emulated,
)
from rooftrace.tracer.emulation.facts import Device as Device
from rooftrace.tracer.emulation.here import (
    Clock as Clock,
    Meter as Meter,
)
from rooftrace.tracer.emulation.refused import (
    DeviceError as DeviceError,
)
