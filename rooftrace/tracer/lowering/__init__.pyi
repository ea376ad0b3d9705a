from rooftrace.tracer.lowering.blocks import NotAlikeError as NotAlikeError
from rooftrace.tracer.lowering.lowering import (
    lower as lower,
    with_fallbacks as with_fallbacks,
    without_asides as without_asides,
)
