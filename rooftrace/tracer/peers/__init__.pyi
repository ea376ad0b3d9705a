from rooftrace.tracer.peers.counting import (
    count_phases as count_phases,
)
from rooftrace.tracer.peers.counts import (
    PeerCount as PeerCount,
)
