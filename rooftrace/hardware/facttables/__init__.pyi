from rooftrace.hardware.facttables.findings import Finding as Finding
from rooftrace.hardware.facttables.tables import (
    FactFileError as FactFileError,
    FactTable as FactTable,
    Problems as Problems,
    fact_rows as fact_rows,
    toml_sections as toml_sections,
)
