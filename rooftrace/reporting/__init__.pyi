from rooftrace.reporting import (
    manyreports as manyreports,
    rooflinesteps as rooflinesteps,
    timelines as timelines,
)
from rooftrace.reporting.differences import (
    diff as diff,
)
from rooftrace.reporting.estimates import (
    estimate as estimate,
    in_precisions as in_precisions,
    priced as priced,
)
from rooftrace.reporting.fleetsweeps import (
    SweepFleet as SweepFleet,
)
