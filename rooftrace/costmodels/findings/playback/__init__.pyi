from rooftrace.costmodels.findings.playback.playing import (
    Folded as Folded,
    Playback as Playback,
    Played as Played,
    play as play,
)
