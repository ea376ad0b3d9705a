from rooftrace.costmodels.network.exchanging import (
    expert_exchange_seconds as expert_exchange_seconds,
)
from rooftrace.costmodels.network.timing import (
    CollectiveTime as CollectiveTime,
    collective_seconds as collective_seconds,
    link_seconds as link_seconds,
)
from rooftrace.costmodels.network.wire import (
    per_rank_link_bytes as per_rank_link_bytes,
    steps_of as steps_of,
)
