from rooftrace.reporting.pages import files as files
from rooftrace.reporting.pages.report import (
    Report as Report,
    build_report as build_report,
    conditions as conditions,
)
