from rooftrace.costmodels.explaining.explanations import (
    ExplainedKernel as ExplainedKernel,
    Explanation as Explanation,
    explained as explained,
)
from rooftrace.costmodels.explaining.sizesweeps import (
    SizeSweep as SizeSweep,
    SweepRow as SweepRow,
    size_sweep as size_sweep,
)
from rooftrace.costmodels.explaining.stepexplained import (
    critical_of as critical_of,
)
