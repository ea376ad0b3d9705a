from rooftrace.costmodels.answers import (
    candidates as candidates,
    capacity as capacity,
    passing as passing,
    rates as rates,
    serving as serving,
    workloads as workloads,
)
