"""Elasticities, designs of experiments, slopes of a step by its sizes."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
