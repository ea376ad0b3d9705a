from rooftrace.reporting import (
    rooflinesteps as rooflinesteps,
)
from rooftrace.reporting.differences import (
    diff as diff,
)
from rooftrace.reporting.estimates import (
    estimate as estimate,
)
from rooftrace.reporting.fleetsweeps import (
    SweepFleet as SweepFleet,
)
from rooftrace.reporting.traces import (
    in_precisions as in_precisions,
    priced as priced,
)
