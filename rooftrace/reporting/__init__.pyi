from rooftrace.reporting import (
    reportfolder as reportfolder,
    rooflinesteps as rooflinesteps,
    stepforms as stepforms,
    sweeps as sweeps,
)
from rooftrace.reporting.differences import diff as diff
from rooftrace.reporting.estimates import estimate as estimate
from rooftrace.reporting.reportfolder import Report as Report
from rooftrace.reporting.traces import in_precisions as in_precisions, priced as priced
