from rooftrace.costmodels.disaggregating.serving import (
    Disaggregated as Disaggregated,
    ServingSide as ServingSide,
    disaggregated as disaggregated,
)
