"""A local page to compose two experts, ask compositions side by side, and compare their answers.

`play` serves a plan's two experts from a thread, for notebooks; `layerswap play` serves them from
the command line. Everything that the page computes is asked of the rooms below.
"""

import sys
from types import ModuleType

from layerswap.play.serve import play

__all__ = ["play"]


class _Room(ModuleType):
    """Makes the package `layerswap.play` callable as its function `play`."""

    __call__ = staticmethod(play)


sys.modules[__name__].__class__ = _Room
