from rooftrace.tracer.values import choices as choices, masks as masks
from rooftrace.tracer.values.masks import META as META, REAL_VALUE as REAL_VALUE
from rooftrace.tracer.values.values import UnknownValueError as UnknownValueError, Values as Values
