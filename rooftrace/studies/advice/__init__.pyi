from rooftrace.studies.advice.breaks import (
    BreakCost as BreakCost,
    GraphBreaks as GraphBreaks,
    price_breaks as price_breaks,
)
from rooftrace.studies.advice.savings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
from rooftrace.studies.advice.variants import (
    NamedNumbers as NamedNumbers,
    Study as Study,
    UnknownNumberError as UnknownNumberError,
    Variant as Variant,
    VariantOutcome as VariantOutcome,
)
from rooftrace.studies.advice.whatifs import (
    Guidance as Guidance,
    WhatIf as WhatIf,
    guidance as guidance,
)
