from rooftrace.costmodels.findings.diffs import (
    changes as changes,
    conditions as conditions,
)
from rooftrace.costmodels.findings.diffs.changes import (
    Change as Change,
    Diff as Diff,
)
from rooftrace.costmodels.findings.diffs.conditions import (
    parse_condition as parse_condition,
)
