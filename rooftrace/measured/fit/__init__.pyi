from rooftrace.measured.fit import collectives as collectives, misses as misses
from rooftrace.measured.fit.byfactors import (
    Measured as Measured,
    StepBytes as StepBytes,
    byte_factors as byte_factors,
    step_bytes as step_bytes,
)
from rooftrace.measured.fit.calibrating import Calibration as Calibration, calibrated as calibrated
from rooftrace.measured.fit.cases import Errors as Errors, errors as errors
from rooftrace.measured.fit.collectives import (
    calibrate_collectives as calibrate_collectives,
    read_collectives as read_collectives,
)
from rooftrace.measured.fit.idleness import idleness_of as idleness_of
from rooftrace.measured.fit.misses import Node as Node
from rooftrace.measured.fit.validating import validated as validated
from rooftrace.measured.fit.validation import (
    NodeCheck as NodeCheck,
    StepCheck as StepCheck,
    Validation as Validation,
)
