from rooftrace.graph.formulas import leaves as leaves, polynomials as polynomials
from rooftrace.graph.formulas.forms import GraphForm as GraphForm, RecordForm as RecordForm
from rooftrace.graph.formulas.leaves import StructureError as StructureError
from rooftrace.graph.formulas.polynomials import (
    Fitter as Fitter,
    Formula as Formula,
    FormulaError as FormulaError,
)
from rooftrace.graph.formulas.surveying import Regime as Regime, Survey as Survey
from rooftrace.graph.formulas.tracked import (
    Guard as Guard,
    Track as Track,
    expected as expected,
)
