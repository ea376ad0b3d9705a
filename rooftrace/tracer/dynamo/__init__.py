"""Where in the user's code something happens: source lines, and errors that quote them."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
