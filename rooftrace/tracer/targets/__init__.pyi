from rooftrace.tracer.targets import isolation as isolation, quantized_weights as quantized_weights
from rooftrace.tracer.targets.target import load_module as load_module, load_target as load_target
