from rooftrace.measured.live.notes import CallNote as CallNote
from rooftrace.measured.live.results import (
    Figures as Figures,
    LiveResult as LiveResult,
    OffKernel as OffKernel,
)
from rooftrace.measured.live.session import LiveSession as LiveSession, live as live
from rooftrace.measured.live.trainers import (
    lightning_callback as lightning_callback,
    trainer_callback as trainer_callback,
)
