from rooftrace.costmodels.rewrites.rewrites import (
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
