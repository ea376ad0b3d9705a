from rooftrace.costmodels.opviews.opview import (
    OpView as OpView,
    Slot as Slot,
    TensorView as TensorView,
)
