from rooftrace.reporting.fleets.running import FleetStopped as FleetStopped, run_fleet as run_fleet
from rooftrace.reporting.fleets.sweeps import SweepFleet as SweepFleet, sweep_fleet as sweep_fleet
from rooftrace.reporting.fleets.tasks import (
    FleetError as FleetError,
    FleetResult as FleetResult,
    Task as Task,
    load_fleet as load_fleet,
)
