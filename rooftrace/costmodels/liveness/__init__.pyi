from rooftrace.costmodels.liveness.lives import (
    Lives as Lives,
    Step as Step,
    Steps as Steps,
    lifetimes as lifetimes,
)
