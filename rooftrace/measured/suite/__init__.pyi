from rooftrace.measured.suite.measure import (
    default_out as default_out,
    measure_suite as measure_suite,
    summary as summary,
)
from rooftrace.measured.suite.micrographs import (
    traced_micro as traced_micro,
)
from rooftrace.measured.suite.models import (
    traced_model as traced_model,
)
from rooftrace.measured.suite.session import (
    BUDGET_S as BUDGET_S,
    QUICK_S as QUICK_S,
    Plan as Plan,
    start_again as start_again,
)
