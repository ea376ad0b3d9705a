from rooftrace.costmodels.liveness.lives import (
    EDGE as EDGE,
    Lives as Lives,
    Visit as Visit,
    Visits as Visits,
    bytes_of_weights as bytes_of_weights,
    lifetimes as lifetimes,
)
