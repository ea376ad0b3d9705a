from rooftrace.costmodels.estimates import moduletree as moduletree, rows as rows
from rooftrace.costmodels.estimates.census import Census as Census, Product as Product
from rooftrace.costmodels.estimates.counters import (
    Comparison as Comparison,
    compare as compare,
    flop_counts as flop_counts,
)
from rooftrace.costmodels.estimates.estimates import Estimate as Estimate, estimate as estimate
from rooftrace.costmodels.estimates.moduletree import Island as Island, islands as islands
from rooftrace.costmodels.estimates.nodes import NodeTable as NodeTable
from rooftrace.costmodels.estimates.playback import (
    Folded as Folded,
    Following as Following,
    Playback as Playback,
    Played as Played,
    kernels_in_order as kernels_in_order,
    play as play,
)
from rooftrace.costmodels.estimates.rows import Row as Row
from rooftrace.costmodels.estimates.scripts import (
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
    price_script as price_script,
)
from rooftrace.costmodels.estimates.structure import (
    INPUT as INPUT,
    OUTPUT as OUTPUT,
    Anatomy as Anatomy,
    WiredNode as WiredNode,
    Wiring as Wiring,
    anatomy as anatomy,
)
