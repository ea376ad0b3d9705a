from rooftrace.tracer.lowering.blocks import NotAlikeError as NotAlikeError
from rooftrace.tracer.lowering.lowering import (
    lower as lower,
    with_fallbacks as with_fallbacks,
    without_unused as without_unused,
)
from rooftrace.tracer.lowering.rebuild import to_fx as to_fx, written as written
