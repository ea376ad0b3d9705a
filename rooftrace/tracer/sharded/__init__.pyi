from rooftrace.tracer.sharded import (
    ddp as ddp,
    fsdp as fsdp,
    huggingface as huggingface,
    meshes as meshes,
    streams as streams,
)
from rooftrace.tracer.sharded.meshes import (
    fake_mesh as fake_mesh,
)
