from rooftrace.studies.forms import kernelforms as kernelforms, planform as planform
from rooftrace.studies.forms.kernelforms import Points as Points
from rooftrace.studies.forms.planform import PlanForm as PlanForm
from rooftrace.studies.forms.pricing import Conditions as Conditions, PlanForms as PlanForms
