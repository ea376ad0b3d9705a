from rooftrace.reporting.commands import (
    calls as calls,
    compat as compat,
    differences as differences,
    estimates as estimates,
    explaining as explaining,
    measurements as measurements,
    meshes as meshes,
    options as options,
    pricing as pricing,
    reportfolder as reportfolder,
    reports as reports,
    rooflinesteps as rooflinesteps,
    sensitivity as sensitivity,
    solving as solving,
    sweeps as sweeps,
)
from rooftrace.reporting.commands.differences import diff as diff
from rooftrace.reporting.commands.estimates import estimate as estimate
from rooftrace.reporting.commands.fleet_sweeps import (
    SweepFleet as SweepFleet,
    sweep_fleet as sweep_fleet,
)
from rooftrace.reporting.commands.fleet_tasks import (
    FleetResult as FleetResult,
    Task as Task,
    load_fleet as load_fleet,
)
from rooftrace.reporting.commands.fleets import FleetStopped as FleetStopped, run_fleet as run_fleet
from rooftrace.reporting.commands.reportfolder import Report as Report
from rooftrace.reporting.commands.requests import in_precisions as in_precisions, priced as priced
