from rooftrace.tracer.targets.apart import (
    Traced as Traced,
    can_go_apart as can_go_apart,
    naming as naming,
    trace_apart as trace_apart,
)
from rooftrace.tracer.targets.inputs import (
    call_inputs as call_inputs,
    with_batch as with_batch,
)
from rooftrace.tracer.targets.isolation import (
    Kept as Kept,
    digest as digest,
    imported_again as imported_again,
    keeping as keeping,
    own_imports as own_imports,
    source_files as source_files,
)
from rooftrace.tracer.targets.target import (
    load_target as load_target,
    module_inputs as module_inputs,
)
