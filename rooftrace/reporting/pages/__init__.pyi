from rooftrace.reporting.pages.files import (
    check_folder as check_folder,
    write_validation as write_validation,
)
from rooftrace.reporting.pages.report import (
    ALL_FORMATS as ALL_FORMATS,
    FORMATS as FORMATS,
    Report as Report,
    build_report as build_report,
)
