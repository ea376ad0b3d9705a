from rooftrace.tracer.dtypes.naming import (
    dtype_name as dtype_name,
    torch_dtype as torch_dtype,
)
