from rooftrace.costmodels.explaining import sizesweeps as sizesweeps
from rooftrace.costmodels.explaining.explanations import (
    ExplainedKernel as ExplainedKernel,
    Explanation as Explanation,
    explained as explained,
    plan_at as plan_at,
)
from rooftrace.costmodels.explaining.stepexplained import (
    critical_of as critical_of,
)
