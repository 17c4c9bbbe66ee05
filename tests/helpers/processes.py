"""Programs in processes of their own, which find the helpers as the tests do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]


def layerswap(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command `layerswap`, in a fresh process."""
    command = [sys.executable, "-m", "layerswap", *map(str, words)]
    return subprocess.run(command, **{"capture_output": True, "text": True, **options}, check=False)


def run(code: str, *args: object, inside: Sequence[str] = (), **env: str) -> str:
    """The output of a Python program, in a fresh process that the command `inside` starts."""
    done = subprocess.run(
        [*inside, sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
