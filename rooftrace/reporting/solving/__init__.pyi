from rooftrace.reporting.solving.answering import (
    plot_answer as plot_answer,
    solve as solve,
)
