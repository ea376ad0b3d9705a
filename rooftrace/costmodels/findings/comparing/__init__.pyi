from rooftrace.costmodels.findings.comparing.differences import (
    compare_sources as compare_sources,
    diff_estimates as diff_estimates,
)
