from rooftrace.reporting.api import (
    calibrate as calibrate,
    compare as compare,
    diff as diff,
    estimate as estimate,
    largest_batch as largest_batch,
    priced_graphs as priced_graphs,
    profile as profile,
    report as report,
    summary as summary,
    validate as validate,
)
