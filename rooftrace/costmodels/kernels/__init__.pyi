from rooftrace.costmodels.kernels import engines as engines, seconds as seconds, works as works
from rooftrace.costmodels.kernels.attention import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.engines import group_class as group_class
