from rooftrace.costmodels.findings.diffs.changes import (
    Change as Change,
    Diff as Diff,
    ModuleChange as ModuleChange,
)
from rooftrace.costmodels.findings.diffs.conditions import parse_condition as parse_condition
from rooftrace.costmodels.findings.diffs.differences import (
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
)
