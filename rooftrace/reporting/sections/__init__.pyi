from rooftrace.reporting.sections.builders import report_view as report_view, section as section
from rooftrace.reporting.sections.report_json import document as document
from rooftrace.reporting.sections.results import Results as Results, Tally as Tally, tally as tally
