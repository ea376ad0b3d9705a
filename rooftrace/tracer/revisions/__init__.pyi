from rooftrace.tracer.revisions import origins as origins, repositories as repositories
from rooftrace.tracer.revisions.origins import first_bad as first_bad
from rooftrace.tracer.revisions.repositories import RevisionError as RevisionError
