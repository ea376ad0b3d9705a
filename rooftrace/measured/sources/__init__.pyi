from rooftrace.measured.sources.kinds import (
    Measured as Measured,
    Records as Records,
    counts_of as counts_of,
    records_of as records_of,
    source as source,
    source_of as source_of,
)
