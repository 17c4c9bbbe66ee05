"""A private part of submitit: the script that it submits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def job_script(folder: Path, parameters: Mapping[str, Any]) -> str:
    """The script of a job with these parameters, which does nothing."""
    import submitit

    executor = submitit.SlurmExecutor(folder=folder)
    executor.update_parameters(**parameters)
    return str(executor._make_submission_file_text("true", "check"))
