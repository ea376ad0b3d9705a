from rooftrace.costmodels.rewriting.editing import (
    EFFICIENT as EFFICIENT,
    LIBRARY as LIBRARY,
    UNFUSED as UNFUSED,
    WRITTEN_OUT as WRITTEN_OUT,
)
from rooftrace.costmodels.rewriting.rewrites import (
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
