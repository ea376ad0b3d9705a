from rooftrace.costmodels.rewriting.rewrites import (
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
