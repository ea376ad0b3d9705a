from rooftrace.costmodels.solving import (
    candidates as candidates,
    rates as rates,
    serving as serving,
    workloads as workloads,
)
from rooftrace.costmodels.solving.meshes import (
    MeshAnswer as MeshAnswer,
    MeshRow as MeshRow,
    ScalingAnswer as ScalingAnswer,
    mesh_words as mesh_words,
    meshes_of as meshes_of,
    row_of as row_of,
)
from rooftrace.costmodels.solving.split_serving import (
    Disaggregated as Disaggregated,
    disaggregated as disaggregated,
)
