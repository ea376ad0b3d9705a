from rooftrace.tracer.values import distinct as distinct, marks as marks
from rooftrace.tracer.values.marks import (
    META as META,
    REAL_VALUE as REAL_VALUE,
)
from rooftrace.tracer.values.values import (
    UnknownValueError as UnknownValueError,
    Values as Values,
)
