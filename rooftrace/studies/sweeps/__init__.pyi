from rooftrace.studies.sweeps import evaluating as evaluating, grids as grids
from rooftrace.studies.sweeps.evaluating import (
    Form as Form,
    evaluated as evaluated,
    looks_like_form as looks_like_form,
    points_of as points_of,
)
from rooftrace.studies.sweeps.sweeps import (
    Sweep as Sweep,
    SweepCase as SweepCase,
)
