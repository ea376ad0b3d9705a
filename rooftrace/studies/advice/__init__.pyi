from rooftrace.studies.advice.breaks import (
    BreakCost as BreakCost,
    GraphBreaks as GraphBreaks,
    price_breaks as price_breaks,
)
from rooftrace.studies.advice.fits import fitting as fitting
from rooftrace.studies.advice.variants import (
    Headroom as Headroom,
    NamedNumbers as NamedNumbers,
    Saving as Saving,
    Study as Study,
    UnknownNumberError as UnknownNumberError,
    Variant as Variant,
    VariantOutcome as VariantOutcome,
    headroom as headroom,
)
from rooftrace.studies.advice.whatifs import (
    Guidance as Guidance,
    WhatIf as WhatIf,
    guidance as guidance,
)
