from rooftrace.costmodels.planforms import kernelforms as kernelforms, planform as planform
from rooftrace.costmodels.planforms.kernelforms import Points as Points
from rooftrace.costmodels.planforms.planform import PlanForm as PlanForm
from rooftrace.costmodels.planforms.pricing import Conditions as Conditions, PlanForms as PlanForms
