from rooftrace.measured.alignment import calls as calls, keys as keys
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
