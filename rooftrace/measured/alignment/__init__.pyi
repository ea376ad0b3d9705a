from rooftrace.measured.alignment import keys as keys
from rooftrace.measured.alignment.aligning import (
    align as align,
)
from rooftrace.measured.alignment.alignment import (
    Alignment as Alignment,
    Stray as Stray,
)
from rooftrace.measured.alignment.counters import (
    counted as counted,
)
from rooftrace.measured.alignment.notes import (
    step_notes as step_notes,
)
