from rooftrace.costmodels.fusion import KernelView as KernelView, fusion as fusion
from rooftrace.costmodels.ops import (
    Access as Access,
    Cost as Cost,
    OpView as OpView,
    Work as Work,
    rule as rule,
)
from rooftrace.measured.profiles import source as source
from rooftrace.reporting.renderers import units as units
from rooftrace.reporting.renderers.view import (
    Column as Column,
    Note as Note,
    Section as Section,
    Table as Table,
)
from rooftrace.reporting.sections import section as section
from rooftrace.tracer.names import phase as phase
