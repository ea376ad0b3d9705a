from rooftrace.measured.profiles.aligning import (
    PROFILER_STEP as PROFILER_STEP,
    Alignment as Alignment,
    Key as Key,
    Stray as Stray,
    align as align,
    key_of_call as key_of_call,
    key_of_op as key_of_op,
)
from rooftrace.measured.profiles.counters import (
    Counted as Counted,
    counted as counted,
)
from rooftrace.measured.profiles.kineto import (
    read_trace as read_trace,
)
from rooftrace.measured.profiles.linking import (
    LAUNCH as LAUNCH,
    OP as OP,
    WHOLE as WHOLE,
)
from rooftrace.measured.profiles.ncu import (
    read_counters as read_counters,
)
from rooftrace.measured.profiles.records import (
    Profile as Profile,
    ProfileError as ProfileError,
)
from rooftrace.measured.profiles.source import (
    KINDS as KINDS,
    Kind as Kind,
    kind_of as kind_of,
)
from rooftrace.measured.profiles.steps import (
    StepTime as StepTime,
    read_steps as read_steps,
)
