from rooftrace.tracer.targets.quantization import ggufs as ggufs
from rooftrace.tracer.targets.quantization.declared import (
    Declared as Declared,
    declared_in as declared_in,
)
from rooftrace.tracer.targets.quantization.marking import (
    Marked as Marked,
    forms_of_copy as forms_of_copy,
    marked as marked,
)
