from rooftrace.diffs.runs import rundiff as rundiff
from rooftrace.diffs.runs.diffing import (
    RunQuestion as RunQuestion,
    diff_runs as diff_runs,
    is_measured as is_measured,
)
from rooftrace.diffs.runs.rundiff import RunDiff as RunDiff
