from rooftrace.reporting.requests import (
    calls as calls,
    options as options,
    pricing as pricing,
    questions as questions,
)
from rooftrace.reporting.requests.steps import StepRequest as StepRequest
