from rooftrace.costmodels.exploring import formsteps as formsteps
from rooftrace.costmodels.exploring.exploring import explore as explore
from rooftrace.costmodels.exploring.inputs import (
    DecodeStep as DecodeStep,
    ExploreError as ExploreError,
    Rates as Rates,
    RoutedExperts as RoutedExperts,
)
