from rooftrace.costmodels.findings.counters import (
    Comparison as Comparison,
    Difference as Difference,
    compare as compare,
)
from rooftrace.costmodels.findings.differences import (
    Change as Change,
    Diff as Diff,
    ModuleChange as ModuleChange,
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
    parse_condition as parse_condition,
)
from rooftrace.costmodels.findings.narrow import (
    Island as Island,
    islands as islands,
)
from rooftrace.costmodels.findings.playback import (
    Folded as Folded,
    Playback as Playback,
    Played as Played,
    play as play,
)
from rooftrace.costmodels.findings.savings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
