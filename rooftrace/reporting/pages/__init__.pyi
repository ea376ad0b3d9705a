from rooftrace.reporting.pages.files import (
    check_folder as check_folder,
    write_validation as write_validation,
)
from rooftrace.reporting.pages.page import (
    markdown as markdown,
)
from rooftrace.reporting.pages.report import (
    ALL_FORMATS as ALL_FORMATS,
    FORMATS as FORMATS,
    Report as Report,
    build_report as build_report,
)
from rooftrace.reporting.pages.table import (
    as_text as as_text,
    render_estimates as render_estimates,
)
