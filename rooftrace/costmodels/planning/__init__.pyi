from rooftrace.costmodels.planning.compiled_parts import usual_execution as usual_execution
from rooftrace.costmodels.planning.coverage import (
    Coverage as Coverage,
    Unsupported as Unsupported,
)
from rooftrace.costmodels.planning.launches import Launch as Launch
from rooftrace.costmodels.planning.plans import (
    Plan as Plan,
    plan as plan,
)
