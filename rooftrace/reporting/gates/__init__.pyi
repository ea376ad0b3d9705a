from rooftrace.reporting.gates import (
    checking as checking,
    lock as lock,
    lockfile as lockfile,
    reports as reports,
)
from rooftrace.reporting.gates.making import (
    causes_since as causes_since,
    chips_of as chips_of,
    former as former,
    locked as locked,
    size_words as size_words,
)
from rooftrace.reporting.gates.reports import gate_view as gate_view
