from rooftrace.tracer.dynamo import records as records
from rooftrace.tracer.dynamo.placing import (
    PlacedStep as PlacedStep,
    placed as placed,
)
from rooftrace.tracer.dynamo.records import (
    DynamoRun as DynamoRun,
)
from rooftrace.tracer.dynamo.running import (
    run_dynamo as run_dynamo,
    traced_with_dynamo as traced_with_dynamo,
)
