from rooftrace.costmodels.rewrites.mends import Edit as Edit, findings as findings
from rooftrace.costmodels.rewrites.rewrites import (
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
