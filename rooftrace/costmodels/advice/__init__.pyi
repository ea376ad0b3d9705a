from rooftrace.costmodels.advice.breaks import (
    BreakCost as BreakCost,
    GraphBreaks as GraphBreaks,
    price_breaks as price_breaks,
)
from rooftrace.costmodels.advice.savings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
from rooftrace.costmodels.advice.variants import (
    NamedNumbers as NamedNumbers,
    Study as Study,
    UnknownNumberError as UnknownNumberError,
    Variant as Variant,
    VariantOutcome as VariantOutcome,
)
from rooftrace.costmodels.advice.whatifs import (
    Guidance as Guidance,
    WhatIf as WhatIf,
    guidance as guidance,
)
