"""Parts for a rule, a join, a section, a source or a phase of your own."""

from rooftrace._face import public

__getattr__, __dir__, __all__ = public(__name__, __file__)
