from rooftrace.reporting.pages import files as files
from rooftrace.reporting.pages.files import (
    check_folder as check_folder,
    check_formats as check_formats,
    write_validation as write_validation,
)
from rooftrace.reporting.pages.report import (
    Report as Report,
    build_report as build_report,
    conditions as conditions,
)
