"""Merge methods, one file for each family.

To add a method, write a function on chunks, declared with `merge_method`, in a file of this folder,
and its test. Every module of the folder is imported here, so nothing else has to name it.
mergekit's names for methods are in `layerswap.compose.mergekit_methods`.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from layerswap.methods.method import Method

METHODS: dict[str, Method] = {}
"""Every merge method by its name in recipes."""

for _info in pkgutil.iter_modules(__path__, f"{__name__}."):
    _module = import_module(_info.name)
    _methods = (item for item in vars(_module).values() if isinstance(item, Method))
    METHODS.update({method.name: method for method in _methods})
