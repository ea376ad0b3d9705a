from rooftrace.tracer.whole import shown as shown
from rooftrace.tracer.whole.entries import (
    kept_whole as kept_whole,
    whole_entry as whole_entry,
)
from rooftrace.tracer.whole.library import (
    define as define,
)
from rooftrace.tracer.whole.serving import attend as attend, own_ops as own_ops
