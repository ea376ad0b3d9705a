from rooftrace.costmodels.meshing.records import (
    MeshAnswer as MeshAnswer,
    MeshRow as MeshRow,
    ScalingAnswer as ScalingAnswer,
    mesh_words as mesh_words,
    meshes_of as meshes_of,
    row_of as row_of,
)
