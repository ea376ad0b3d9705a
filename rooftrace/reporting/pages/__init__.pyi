from rooftrace.reporting.pages import rendering as rendering
from rooftrace.reporting.pages.files import (
    check_folder as check_folder,
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
