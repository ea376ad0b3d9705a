from rooftrace.tracer.lower.asides import (
    with_fallbacks as with_fallbacks,
    without_asides as without_asides,
)
from rooftrace.tracer.lower.blocks import (
    NotAlikeError as NotAlikeError,
)
from rooftrace.tracer.lower.lowering import (
    lower as lower,
)
