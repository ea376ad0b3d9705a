from rooftrace.costmodels.rewrites.mends import (
    Edit as Edit,
    findings as findings,
    layer_lists as layer_lists,
    with_checkpoints as with_checkpoints,
    with_small_states as with_small_states,
)
from rooftrace.costmodels.rewrites.rewrites import (
    applicable as applicable,
    check_precisions as check_precisions,
    reprice as reprice,
    rewrite as rewrite,
)
