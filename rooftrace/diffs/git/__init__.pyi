from rooftrace.diffs.git import origins as origins, repositories as repositories
from rooftrace.diffs.git.origins import first_bad as first_bad
from rooftrace.diffs.git.repositories import RevisionError as RevisionError
