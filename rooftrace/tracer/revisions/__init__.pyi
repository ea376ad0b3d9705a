from rooftrace.tracer.revisions import (
    authorship as authorship,
    checkouts as checkouts,
    origins as origins,
    repositories as repositories,
)
from rooftrace.tracer.revisions.bisecting import first_bad as first_bad
from rooftrace.tracer.revisions.program import RevisionError as RevisionError
