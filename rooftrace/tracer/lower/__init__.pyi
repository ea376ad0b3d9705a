from rooftrace.tracer.lower.asides import (
    without_asides as without_asides,
)
from rooftrace.tracer.lower.blocks import (
    NotAlikeError as NotAlikeError,
)
from rooftrace.tracer.lower.fallbacks import (
    with_fallbacks as with_fallbacks,
)
from rooftrace.tracer.lower.lowering import (
    lower as lower,
)
