from rooftrace.diffs import changes as changes
from rooftrace.diffs.changes import Change as Change, Limit as Limit
