from rooftrace.measured.pairing.matching import (
    best_match as best_match,
)
from rooftrace.measured.pairing.reading import (
    Graphs as Graphs,
    MeasuredRequestError as MeasuredRequestError,
    read_measured as read_measured,
)
from rooftrace.measured.pairing.steps import (
    MeasuredStep as MeasuredStep,
    steps_of as steps_of,
)
