"""What every operator costs: one module per kind of operator, each of which registers its rules.

A rule knows shapes, precisions and attributes of one call.  It knows no chip, no fusion and no
other op.  Where its FLOPs come from is said at the rule; how FLOPs of elementwise arithmetic are
counted is said once, in `elementwise`.  Bytes are the compulsory ones: each distinct byte that the
kernel needs once, whatever its caches make of the rest.

Importing this package imports every file in it: a new file of rules needs no line here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
