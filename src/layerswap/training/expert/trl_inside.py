"""Contact with the inside of TRL and its Trainer; a test of its own holds each promise.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

from typing import Any

from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

__all__ = ["FusedCausalLMOutput", "OpenTrainer"]


class OpenTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that tokenizes further data sets."""

    def prepared(self, rows: Any, packing: bool, name: str) -> Any:
        """Tokenize a data set as SFTTrainer does its own; `name` is `train` or `eval`."""
        return self._prepare_dataset(rows, self.processing_class, self.args, packing, None, name)
