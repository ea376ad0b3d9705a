from rooftrace.costmodels.studies.namednumbers import (
    NamedNumbers as NamedNumbers,
    UnknownNumberError as UnknownNumberError,
)
from rooftrace.costmodels.studies.variants import (
    Compared as Compared,
    Study as Study,
    Variant as Variant,
    VariantOutcome as VariantOutcome,
)
