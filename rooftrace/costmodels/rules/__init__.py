"""The cost of every operator: one module per kind of operator, each of which registers its rules.

A rule knows shapes, precisions and attributes of one call.  It knows no chip, no fusion and no
other op.  The docstring of a rule says where its FLOPs come from; `elementwise` says how FLOPs of
elementwise arithmetic are counted.  Bytes are the compulsory ones: a kernel moves each distinct
byte that it needs once, however often its caches read it again.

Importing this package imports every file in it: a new file of rules needs no line here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
