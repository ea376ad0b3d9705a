from rooftrace.reporting.fleets.results import (
    FleetResult as FleetResult,
    load_fleet as load_fleet,
)
from rooftrace.reporting.fleets.running import (
    FleetStopped as FleetStopped,
    run_fleet as run_fleet,
)
from rooftrace.reporting.fleets.tasks import (
    FleetError as FleetError,
    Task as Task,
)
