from rooftrace.studies.explaining import decode_forms as decode_forms, steps as steps
from rooftrace.studies.explaining.critical_batch import (
    DecodeStep as DecodeStep,
    Rates as Rates,
    RoutedExperts as RoutedExperts,
    explore as explore,
)
from rooftrace.studies.explaining.explanations import (
    ExplainedKernel as ExplainedKernel,
    Explanation as Explanation,
    explained as explained,
    plan_at as plan_at,
)
from rooftrace.studies.explaining.steps import critical_of as critical_of
