from rooftrace.costmodels.diffs import changes as changes
from rooftrace.costmodels.diffs.changes import Diff as Diff
from rooftrace.costmodels.diffs.differences import (
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
)
