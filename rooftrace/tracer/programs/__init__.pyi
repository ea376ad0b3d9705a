from rooftrace.tracer.programs.loading import (
    load_program as load_program,
)
from rooftrace.tracer.programs.unflattened import (
    named_class as named_class,
    program_module as program_module,
)
