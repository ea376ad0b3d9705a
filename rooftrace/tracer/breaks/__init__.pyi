from rooftrace.tracer.breaks import records as records
from rooftrace.tracer.breaks.placing import PlacedStep as PlacedStep, placed as placed
from rooftrace.tracer.breaks.records import DynamoRun as DynamoRun
from rooftrace.tracer.breaks.running import traced_with_dynamo as traced_with_dynamo
