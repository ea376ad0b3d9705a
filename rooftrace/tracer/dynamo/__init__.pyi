from rooftrace.tracer.dynamo.placing import (
    Placement as Placement,
    placed as placed,
)
from rooftrace.tracer.dynamo.records import (
    Cause as Cause,
    DynamoError as DynamoError,
    DynamoRun as DynamoRun,
    Joined as Joined,
    Recompiled as Recompiled,
    Stretch as Stretch,
    without as without,
)
from rooftrace.tracer.dynamo.running import (
    run_dynamo as run_dynamo,
    traced_with_dynamo as traced_with_dynamo,
)
