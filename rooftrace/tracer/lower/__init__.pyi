from rooftrace.tracer.lower.blocks import (
    NotAlikeError as NotAlikeError,
)
from rooftrace.tracer.lower.lowering import (
    lower as lower,
)
