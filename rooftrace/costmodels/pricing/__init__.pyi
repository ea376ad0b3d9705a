from rooftrace.costmodels.pricing.families import with_families as with_families
from rooftrace.costmodels.pricing.price import (
    op_cost as op_cost,
    price_ops as price_ops,
    unknown_bytes as unknown_bytes,
)
