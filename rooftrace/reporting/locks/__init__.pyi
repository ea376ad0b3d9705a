from rooftrace.reporting.locks import (
    budgets as budgets,
    checking as checking,
    entries as entries,
    files as files,
    records as records,
    settings as settings,
)
