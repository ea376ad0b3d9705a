"""Modules: their dotted paths, and how often each was called."""

from __future__ import annotations

from torch import nn

from rooftrace.tracer.paths import pattern_of
from rooftrace.tracer.source import source_line
from rooftrace.tracer.tensors import owners


class Paths:
    """The modules of one recording."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}  # the name of the class of each module, by path
        self._paths: dict[int, str] = {}  # by identity
        self._transparent: set[int] = set()  # wrappers that are not shown
        self.counts: dict[str, int] = {}  # how often each module was called, by path
        self.lines: dict[str, str] = {}  # of the first call, by path with indices starred

    def name(self, root: nn.Module) -> None:
        """Use the dotted paths of `root` for its modules.

        A wrapper made by torch.compile is not shown: its module stands in its place.
        """
        for path, module in root.named_modules(remove_duplicate=False):
            shown = owners.shown_path(path)
            if "_orig_mod" in module._modules:
                self._transparent.add(id(module))
            else:
                self._paths.setdefault(id(module), shown)
                self.kinds.setdefault(shown, owners.class_name(module))

    def is_transparent(self, module: nn.Module) -> bool:
        """Whether a module is a wrapper that is not shown."""
        return id(module) in self._transparent

    def is_named(self, module: nn.Module) -> bool:
        """Whether a module has a path."""
        return id(module) in self._paths

    def of(self, module: nn.Module) -> str:
        """The dotted path of a module; "" where it has none."""
        return self._paths.get(id(module), "")

    def times(self, path: str) -> int:
        """How often the module at this path was called."""
        return self.counts.get(path, 0)

    def called(self, module: nn.Module, parent: str) -> tuple[str, int]:
        """Count a call: the path of the module, and how often it was called before.

        parent: the path of the module that calls it.  A module without a path gets the name of its
        class below that.
        """
        path = self._paths.get(id(module))
        if path is None:
            kind = type(module).__name__
            path = f"{parent}.<{kind}>" if parent else f"<{kind}>"
            self.kinds.setdefault(path, kind)
        before = self.times(path)
        self.counts[path] = before + 1
        self.called_from(path, 3)
        return path, before

    def called_from(self, path: str, depth: int) -> None:
        """Note the line of the user's that calls the module at this path, `depth` frames up."""
        place = pattern_of(path)
        if place not in self.lines and (line := source_line(depth)):
            self.lines[place] = line
