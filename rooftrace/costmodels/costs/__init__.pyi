from rooftrace.costmodels.costs.cost import (
    COMPUTED as COMPUTED,
    MATRIX as MATRIX,
    Access as Access,
    AttentionSizes as AttentionSizes,
    Cost as Cost,
    Work as Work,
)
