from rooftrace.costmodels.bytefactors.bytekinds import (
    BYTE_KINDS as BYTE_KINDS,
    WEIGHTS as WEIGHTS,
    bytes_by_kind as bytes_by_kind,
    kinds_of as kinds_of,
)
from rooftrace.costmodels.bytefactors.factors import (
    ByteFactor as ByteFactor,
    ByteFactors as ByteFactors,
)
