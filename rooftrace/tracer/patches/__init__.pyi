from rooftrace.tracer.patches import contexts as contexts, shared as shared
from rooftrace.tracer.patches.replacing import (
    original_of as original_of,
    put as put,
    replaced as replaced,
)
from rooftrace.tracer.patches.scopes import Scope as Scope
