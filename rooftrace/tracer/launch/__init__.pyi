from rooftrace.tracer.launch import ownprocess as ownprocess
from rooftrace.tracer.launch.launchers import understood as understood
from rooftrace.tracer.launch.ownprocess import call_apart as call_apart
from rooftrace.tracer.launch.records import Ended as Ended, Ranks as Ranks
from rooftrace.tracer.launch.running import launched as launched
