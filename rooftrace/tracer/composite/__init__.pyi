from rooftrace.tracer.composite import library as library
from rooftrace.tracer.composite.entries import kept_whole as kept_whole, whole_entry as whole_entry
from rooftrace.tracer.composite.library import define as define
from rooftrace.tracer.composite.serving import attend as attend, own_ops as own_ops
