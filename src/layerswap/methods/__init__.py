"""Merge methods, one file each.

To add a method, write one file in this folder and its test: a function on chunks, declared with
`merge_method`, and mergekit's spellings of it, if any, as `SPELLINGS`. Every module of the folder
is imported here, so nothing else has to name it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from layerswap.methods.mergekit import Spelling
from layerswap.methods.method import Method

METHODS: dict[str, Method] = {}
"""Every merge method by its name in recipes."""
SPELLINGS: dict[str, Spelling] = {}
"""Every method of mergekit that can be read, by mergekit's name."""

for _info in pkgutil.iter_modules(__path__, f"{__name__}."):
    _module = import_module(_info.name)
    _methods = (item for item in vars(_module).values() if isinstance(item, Method))
    METHODS.update({method.name: method for method in _methods})
    SPELLINGS.update({spelling.name: spelling for spelling in getattr(_module, "SPELLINGS", ())})
