from rooftrace.reporting.chakra.saving import (
    save_chakra as save_chakra,
    write_traces as write_traces,
)
