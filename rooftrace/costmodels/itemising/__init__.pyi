from rooftrace.costmodels.itemising.counting import (
    census as census,
)
from rooftrace.costmodels.itemising.nodes import (
    NodeTable as NodeTable,
    StepNode as StepNode,
    node_table as node_table,
)
from rooftrace.costmodels.itemising.products import (
    Census as Census,
    Product as Product,
)
