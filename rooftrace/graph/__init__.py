"""The operator graph: plain records of the ops of a step, as a file, and as formulas of its sizes.

No torch, no costs, no chips.
"""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
