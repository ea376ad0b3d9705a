"""Programs in files: what torch.export.save wrote, and ONNX; read as data, which runs no code."""

from rooftrace._face import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
