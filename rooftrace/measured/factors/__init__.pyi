from rooftrace.measured.factors.byfactors import (
    MeasuredFactors as MeasuredFactors,
    byte_factors as byte_factors,
)
from rooftrace.measured.factors.kernelbytes import (
    SHORTEST as SHORTEST,
    Measured as Measured,
    StepBytes as StepBytes,
    step_bytes as step_bytes,
)
