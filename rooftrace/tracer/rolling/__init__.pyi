from rooftrace.tracer.rolling.loops import (
    Loop as Loop,
    Rolling as Rolling,
)
