from rooftrace.measured.validate.checks import (
    PHASES as PHASES,
    ClassCheck as ClassCheck,
    NodeCheck as NodeCheck,
    StepCheck as StepCheck,
    by_class as by_class,
    by_phase as by_phase,
    peak_errors as peak_errors,
)
from rooftrace.measured.validate.misses import (
    CLOSE as CLOSE,
    Node as Node,
    worst as worst,
)
from rooftrace.measured.validate.steps import (
    Graphs as Graphs,
    MeasuredRequestError as MeasuredRequestError,
    MeasuredStep as MeasuredStep,
    best_match as best_match,
    read_measured as read_measured,
    steps_of_run as steps_of_run,
    steps_of_table as steps_of_table,
    what_ran as what_ran,
    why_not as why_not,
)
from rooftrace.measured.validate.validating import (
    Validation as Validation,
    validated as validated,
)
