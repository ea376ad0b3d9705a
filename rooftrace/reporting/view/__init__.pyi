from rooftrace.reporting.view import (
    model as model,
    units as units,
    words as words,
)
from rooftrace.reporting.view.escaping import (
    runs as runs,
)
from rooftrace.reporting.view.markdown import (
    as_page as as_page,
)
from rooftrace.reporting.view.terminal import (
    as_screen as as_screen,
)
