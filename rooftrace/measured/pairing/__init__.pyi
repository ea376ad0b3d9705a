from rooftrace.measured.pairing import matching as matching
from rooftrace.measured.pairing.reading import (
    Graphs as Graphs,
    MeasuredRequestError as MeasuredRequestError,
    read_measured as read_measured,
)
from rooftrace.measured.pairing.steps import (
    MeasuredStep as MeasuredStep,
    steps_of as steps_of,
)
