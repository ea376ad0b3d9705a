from rooftrace.tracer.values import marks as marks
from rooftrace.tracer.values.marks import (
    META as META,
    REAL_VALUE as REAL_VALUE,
    UNIFORM as UNIFORM,
)
from rooftrace.tracer.values.values import (
    UnknownValueError as UnknownValueError,
    Values as Values,
)
