from rooftrace.costmodels.pricing.cost import (
    COMPUTED as COMPUTED,
    MATRIX as MATRIX,
    NOTHING as NOTHING,
    Access as Access,
    AttentionSizes as AttentionSizes,
    Cost as Cost,
    OpView as OpView,
    Slot as Slot,
    TensorView as TensorView,
    Work as Work,
)
from rooftrace.costmodels.pricing.families import (
    with_families as with_families,
)
from rooftrace.costmodels.pricing.kinds import (
    KINDS as KINDS,
    PICKS as PICKS,
    PLACES as PLACES,
    REREADS as REREADS,
    FusionClass as FusionClass,
)
from rooftrace.costmodels.pricing.price import (
    op_cost as op_cost,
    price_ops as price_ops,
    unknown_bytes as unknown_bytes,
)
from rooftrace.costmodels.pricing.registry import (
    builtin as builtin,
    find_rule as find_rule,
    own_rules as own_rules,
    rule as rule,
)
