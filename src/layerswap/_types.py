"""Type aliases that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Callable

PathLike = str | os.PathLike[str]
"""A checkpoint or file as users name it: a path, or a Hub id where one is meant."""
Log = Callable[[str], None]
"""Called with one line of progress for a person."""
Advance = Callable[[int], None]
"""Called with the number of units (bytes, requests, steps) just done."""
