from rooftrace.costmodels.findings.playback.following import (
    Following as Following,
    kernels_in_order as kernels_in_order,
)
from rooftrace.costmodels.findings.playback.playing import (
    Folded as Folded,
    Playback as Playback,
    Played as Played,
    play as play,
)
