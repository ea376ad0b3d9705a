from rooftrace.costmodels.ops import cost as cost
from rooftrace.costmodels.ops.bytefactors import (
    BYTE_KINDS as BYTE_KINDS,
    WEIGHTS as WEIGHTS,
    ByteFactor as ByteFactor,
    ByteFactors as ByteFactors,
    bytes_by_kind as bytes_by_kind,
    kinds_of as kinds_of,
)
from rooftrace.costmodels.ops.cost import (
    COMPUTED as COMPUTED,
    KINDS as KINDS,
    MATRIX as MATRIX,
    WIRES as WIRES,
    Access as Access,
    AttentionSizes as AttentionSizes,
    Cost as Cost,
    Work as Work,
)
from rooftrace.costmodels.ops.families import with_families as with_families
from rooftrace.costmodels.ops.opview import (
    OpView as OpView,
    TensorView as TensorView,
    all_rules as all_rules,
    builtin as builtin,
    find_rule as find_rule,
    own_rules as own_rules,
    rule as rule,
    users_rules as users_rules,
)
from rooftrace.costmodels.ops.price import (
    op_cost as op_cost,
    places_in as places_in,
    price_ops as price_ops,
    unknown_bytes as unknown_bytes,
)
