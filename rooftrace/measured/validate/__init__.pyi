from rooftrace.measured.validate import misses as misses
from rooftrace.measured.validate.checks import (
    NodeCheck as NodeCheck,
    StepCheck as StepCheck,
)
from rooftrace.measured.validate.misses import (
    Node as Node,
)
from rooftrace.measured.validate.validating import (
    validated as validated,
)
from rooftrace.measured.validate.validation import (
    Validation as Validation,
)
