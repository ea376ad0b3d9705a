from rooftrace.costmodels.guiding.records import (
    Guidance as Guidance,
    WhatIf as WhatIf,
)
from rooftrace.costmodels.guiding.whatifs import guidance as guidance
