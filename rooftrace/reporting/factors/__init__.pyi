from rooftrace.reporting.factors.words import (
    factor_columns as factor_columns,
    factor_rows as factor_rows,
    factor_sentence as factor_sentence,
)
