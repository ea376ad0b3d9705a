from rooftrace.tracer.graphforms import slots as slots
from rooftrace.tracer.graphforms.forms import (
    GraphForm as GraphForm,
    RecordForm as RecordForm,
)
from rooftrace.tracer.graphforms.leaves import StructureError as StructureError
from rooftrace.tracer.graphforms.series import SeriesGraph as SeriesGraph
from rooftrace.tracer.graphforms.surveying import (
    Regime as Regime,
    Survey as Survey,
)
