from rooftrace.tracer.paths.modulepaths import (
    below as below,
    pattern_of as pattern_of,
    split as split,
)
