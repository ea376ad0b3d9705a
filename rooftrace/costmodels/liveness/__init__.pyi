from rooftrace.costmodels.liveness.lives import (
    EDGE as EDGE,
    Lives as Lives,
    Visit as Visit,
    Visits as Visits,
    lifetimes as lifetimes,
)
