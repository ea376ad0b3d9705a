"""The cost of a step of any nn.Module on a chip, in FLOPs, bytes and time.

    import rooftrace as rt

    graph = rt.trace(model, x)                     # any module, any arguments; no weights, no GPU
    print(rt.estimate(graph, chip="h200-sxm"))     # the table
    rt.report(model, x, chip="h200-sxm", out="report/")

Importing this package imports neither torch nor anything else that is slow to load: names are
looked up when they are first used.  `rooftrace.types` has the classes of results and errors,
`rooftrace.extend` what a rule, a section or a phase of your own is made of, and `rooftrace.tools`
the functions of special jobs.
"""

from rooftrace import _face

_current, _, __all__ = _face.public(__name__, __file__)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("rooftrace")
    return _current(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
