from rooftrace._progress import telling as telling
from rooftrace.costmodels.fusion import execution_model as execution_model
from rooftrace.costmodels.rewrites import reprice as reprice
from rooftrace.measured.alignment import fused as fused
from rooftrace.measured.live import (
    lightning_callback as lightning_callback,
    trainer_callback as trainer_callback,
)
from rooftrace.reporting.commands.compat import (
    dump_model_info as dump_model_info,
    flop_count_table as flop_count_table,
)
from rooftrace.reporting.commands.timelines import save_timeline as save_timeline
from rooftrace.reporting.figures import save_chakra as save_chakra
from rooftrace.reporting.signed import (
    best_mesh as best_mesh,
    explore as explore,
    form as form,
    priced_graphs as priced_graphs,
    reports as reports,
    scaling as scaling,
    sweep_fleet as sweep_fleet,
    training_run as training_run,
)
from rooftrace.studies.advice import guidance as guidance, headroom as headroom
from rooftrace.tracer import trace_target as trace_target
from rooftrace.tracer.sharding import fake_mesh as fake_mesh
