from rooftrace.scripts.launch.launchers import understood as understood
from rooftrace.scripts.launch.records import Ended as Ended, Ranks as Ranks
from rooftrace.scripts.launch.running import launched as launched
