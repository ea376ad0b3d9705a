from rooftrace.measured.fit.calibrating import (
    Calibration as Calibration,
    calibrated as calibrated,
)
from rooftrace.measured.fit.cases import (
    Errors as Errors,
    errors as errors,
)
