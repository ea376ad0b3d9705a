from rooftrace.costmodels.rewrites.editing import (
    HALVES as HALVES,
    Editor as Editor,
    reading_others as reading_others,
)
from rooftrace.costmodels.rewrites.fused_products import (
    under_autocast as under_autocast,
)
from rooftrace.costmodels.rewrites.mends import (
    Edit as Edit,
    findings as findings,
    written_rewrites as written_rewrites,
)
from rooftrace.costmodels.rewrites.rewrites import (
    UNCHANGED as UNCHANGED,
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
from rooftrace.costmodels.rewrites.trained import (
    with_fused_optimizer as with_fused_optimizer,
)
