from rooftrace.tracer.rebuilding.rebuild import (
    to_fx as to_fx,
    written as written,
)
