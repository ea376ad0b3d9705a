"""The breaks of torch.compile: where Dynamo ends a graph, and which ops of a trace lie where."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
