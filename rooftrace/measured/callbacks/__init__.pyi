from rooftrace.measured.callbacks.lightnings import (
    lightning_callback as lightning_callback,
)
from rooftrace.measured.callbacks.trainers import (
    trainer_callback as trainer_callback,
)
