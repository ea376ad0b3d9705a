from rooftrace.measured.runs.runfile import (
    MicroRow as MicroRow,
    ModelRow as ModelRow,
    OpTime as OpTime,
    Run as Run,
    RunFileError as RunFileError,
    load_run as load_run,
)
