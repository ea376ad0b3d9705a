from rooftrace import extend as extend, tools as tools, types as types
from rooftrace.costmodels.fusion import plan as plan
from rooftrace.costmodels.memory import memory as memory
from rooftrace.hardware import available_chips as available_chips, load_chip as load_chip
from rooftrace.measured.bench import measure as measure, measuring as measuring
from rooftrace.measured.live import live as live
from rooftrace.reporting.commands.compat import capture as capture
from rooftrace.reporting.commands.inventories import inventory as inventory
from rooftrace.reporting.signed import (
    calibrate as calibrate,
    compare as compare,
    diff as diff,
    estimate as estimate,
    explain as explain,
    graph_breaks as graph_breaks,
    largest_batch as largest_batch,
    profile as profile,
    report as report,
    roofline as roofline,
    run as run,
    sensitivity as sensitivity,
    solve as solve,
    summary as summary,
    sweep as sweep,
    trace as trace,
    validate as validate,
)
from rooftrace.tracer import load as load, save as save

__version__: str
