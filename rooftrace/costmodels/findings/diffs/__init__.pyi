from rooftrace.costmodels.findings.diffs import changes as changes
from rooftrace.costmodels.findings.diffs.changes import Diff as Diff
from rooftrace.costmodels.findings.diffs.differences import (
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
)
