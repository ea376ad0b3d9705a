from rooftrace.costmodels.factorial.effects import (
    Factorial as Factorial,
    FactorialError as FactorialError,
    Interaction as Interaction,
    MainEffect as MainEffect,
    factorial as factorial,
    grid_of as grid_of,
)
