from rooftrace.tracer.sharded import (
    ddp as ddp,
    fsdp as fsdp,
    huggingface as huggingface,
    meshes as meshes,
)
from rooftrace.tracer.sharded.processes import (
    fake_mesh as fake_mesh,
)
from rooftrace.tracer.sharded.streams import (
    current_stream as current_stream,
)
