from rooftrace.measured.rundiffs import rundiff as rundiff
from rooftrace.measured.rundiffs.diffing import RunQuestion as RunQuestion, diff_runs as diff_runs
from rooftrace.measured.rundiffs.measuredsources import is_measured as is_measured
from rooftrace.measured.rundiffs.rundiff import RunDiff as RunDiff
