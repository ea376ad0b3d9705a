from rooftrace.reporting.sections.costs import (
    fit_section as fit_section,
    steps_section as steps_section,
)
from rooftrace.reporting.sections.glossary import (
    HOW_TO_READ as HOW_TO_READ,
)
from rooftrace.reporting.sections.phase import (
    phase_section as phase_section,
)
from rooftrace.reporting.sections.report_document import (
    document as document,
)
from rooftrace.reporting.sections.summary import (
    summary as summary,
)
from rooftrace.reporting.sections.tallies import (
    Tally as Tally,
    tally as tally,
)
from rooftrace.reporting.sections.trust import (
    assumptions_section as assumptions_section,
    chips_section as chips_section,
    coverage_section as coverage_section,
    islands_section as islands_section,
)
