from rooftrace.costmodels.exploring.exploring import (
    Explored as Explored,
    explore as explore,
)
from rooftrace.costmodels.exploring.inputs import (
    DecodeStep as DecodeStep,
    ExploreError as ExploreError,
    Rates as Rates,
    RoutedExperts as RoutedExperts,
)
