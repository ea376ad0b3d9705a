from rooftrace.costmodels.sweeping.evaluating import (
    evaluated as evaluated,
)
from rooftrace.costmodels.sweeping.stepforms import (
    Form as Form,
    points_of as points_of,
)
from rooftrace.costmodels.sweeping.sweeps import (
    Sweep as Sweep,
    SweepCase as SweepCase,
    lines_of as lines_of,
)
