from rooftrace.costmodels.anatomy.parts import (
    Anatomy as Anatomy,
    anatomy as anatomy,
)
from rooftrace.costmodels.anatomy.wiring import (
    INPUT as INPUT,
    OUTPUT as OUTPUT,
    WiredNode as WiredNode,
    Wiring as Wiring,
)
