from rooftrace.tracer.formulas import functions as functions
from rooftrace.tracer.formulas.fitting import Fitter as Fitter
from rooftrace.tracer.formulas.polynomials import (
    Formula as Formula,
    FormulaError as FormulaError,
)
from rooftrace.tracer.formulas.tracked import (
    Guard as Guard,
    Track as Track,
)
