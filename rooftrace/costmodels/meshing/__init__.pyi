from rooftrace.costmodels.meshing.meshes import (
    mesh_words as mesh_words,
    meshes_of as meshes_of,
)
from rooftrace.costmodels.meshing.records import (
    MeshAnswer as MeshAnswer,
    MeshRow as MeshRow,
    ScalingAnswer as ScalingAnswer,
    row_of as row_of,
)
