from rooftrace.costmodels.findings import moduletree as moduletree
from rooftrace.costmodels.findings.narrow import (
    Island as Island,
    islands as islands,
)
from rooftrace.costmodels.findings.savings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
