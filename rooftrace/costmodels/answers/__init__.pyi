from rooftrace.costmodels.answers import (
    capacity as capacity,
    passing as passing,
    rates as rates,
    serving as serving,
)
from rooftrace.costmodels.answers.candidates import (
    Candidates as Candidates,
    Service as Service,
)
from rooftrace.costmodels.answers.workloads import (
    Limits as Limits,
    Mix as Mix,
)
