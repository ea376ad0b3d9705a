from rooftrace.hardware import chip as chip, precisions as precisions, units as units
from rooftrace.hardware.chip import Chip as Chip
from rooftrace.hardware.chipfile.reading import (
    Host as Host,
    available_chips as available_chips,
    available_hosts as available_hosts,
    host_spread_of as host_spread_of,
    load_chip as load_chip,
    load_host as load_host,
)
