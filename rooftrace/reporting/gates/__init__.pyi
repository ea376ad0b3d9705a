from rooftrace.reporting.gates import reports as reports
from rooftrace.reporting.gates.history import causes_since as causes_since
from rooftrace.reporting.gates.making import (
    former as former,
    locked as locked,
    size_words as size_words,
)
from rooftrace.reporting.gates.words import gate_view as gate_view
