from rooftrace.studies.breaks import placing as placing
from rooftrace.studies.breaks.placing import (
    DynamoRun as DynamoRun,
    PlacedStep as PlacedStep,
    placed as placed,
)
from rooftrace.studies.breaks.running import traced_with_dynamo as traced_with_dynamo
