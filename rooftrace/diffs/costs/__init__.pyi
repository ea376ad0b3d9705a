from rooftrace.diffs.costs import changes as changes
from rooftrace.diffs.costs.changes import Diff as Diff
from rooftrace.diffs.costs.differences import (
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
)
