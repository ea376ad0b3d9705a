"""Words and pictures: estimates become tables, figures, files, a command line; prices nothing."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
