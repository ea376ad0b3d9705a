from rooftrace.tracer.dynamo.running import run_dynamo as run_dynamo
