from rooftrace.tracer.formulas.fitting import Fitter as Fitter
from rooftrace.tracer.formulas.functions import (
    FUNCTIONS as FUNCTIONS,
    expected_distinct as expected_distinct,
    snapped as snapped,
)
from rooftrace.tracer.formulas.polynomials import (
    Formula as Formula,
    FormulaError as FormulaError,
)
