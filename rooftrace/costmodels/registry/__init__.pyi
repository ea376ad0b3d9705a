from rooftrace.costmodels.registry.kinds import (
    KINDS as KINDS,
)
from rooftrace.costmodels.registry.lookup import (
    find_rule as find_rule,
    own_rules as own_rules,
    users_rules as users_rules,
)
from rooftrace.costmodels.registry.rulebook import (
    builtin as builtin,
    rule as rule,
)
