from rooftrace.measured.suite.micro import (
    traced_micro as traced_micro,
)
from rooftrace.measured.suite.models import (
    traced_model as traced_model,
)
from rooftrace.measured.suite.plan import (
    SuitePlan as SuitePlan,
)
from rooftrace.measured.suite.running import (
    measure_suite as measure_suite,
    summary as summary,
)
from rooftrace.measured.suite.session import (
    start_again as start_again,
)
