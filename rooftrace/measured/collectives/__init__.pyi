from rooftrace.measured.collectives import fitting as fitting
from rooftrace.measured.collectives.calibrating import (
    CollectiveCalibration as CollectiveCalibration,
    calibrate_collectives as calibrate_collectives,
)
from rooftrace.measured.collectives.fitting import TimedCollective as TimedCollective
from rooftrace.measured.collectives.reading import read_collectives as read_collectives
