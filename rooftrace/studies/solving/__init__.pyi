from rooftrace.studies.solving import (
    candidates as candidates,
    serving as serving,
    workloads as workloads,
)
from rooftrace.studies.solving.meshes import (
    MeshAnswer as MeshAnswer,
    MeshRow as MeshRow,
    ScalingAnswer as ScalingAnswer,
    TrainingRun as TrainingRun,
    mesh_words as mesh_words,
    meshes_of as meshes_of,
    row_of as row_of,
    with_experts as with_experts,
)
