from rooftrace.tracer.formulas import leaves as leaves, polynomials as polynomials
from rooftrace.tracer.formulas.forms import GraphForm as GraphForm, RecordForm as RecordForm
from rooftrace.tracer.formulas.leaves import StructureError as StructureError
from rooftrace.tracer.formulas.polynomials import (
    Fitter as Fitter,
    Formula as Formula,
    FormulaError as FormulaError,
)
from rooftrace.tracer.formulas.sizing import (
    SizedSource as SizedSource,
    TraceCache as TraceCache,
    at_batches as at_batches,
)
from rooftrace.tracer.formulas.surveying import Regime as Regime, Survey as Survey
from rooftrace.tracer.formulas.tracked import Guard as Guard, Track as Track
