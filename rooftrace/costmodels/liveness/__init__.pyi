from rooftrace.costmodels.liveness.lives import (
    Lives as Lives,
    Visit as Visit,
    Visits as Visits,
    lifetimes as lifetimes,
)
