"""Whether any batch makes a decode step limited by computing, with experts on several devices."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
