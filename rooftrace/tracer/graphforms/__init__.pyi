from rooftrace.tracer.graphforms.forms import (
    GraphForm as GraphForm,
    UnfitError as UnfitError,
)
from rooftrace.tracer.graphforms.leaves import StructureError as StructureError
