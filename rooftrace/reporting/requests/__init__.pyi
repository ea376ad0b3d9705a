from rooftrace.reporting.requests import (
    calls as calls,
    options as options,
    pricing as pricing,
    readers as readers,
    traces as traces,
)
from rooftrace.reporting.requests.steps import StepRequest as StepRequest
