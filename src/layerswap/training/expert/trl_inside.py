"""Contact with the inside of TRL and its Trainer; a test of its own holds each promise.

Imports TRL when it is imported; import this module inside functions only.
"""

from __future__ import annotations

import inspect
from typing import Any

from trl import SFTTrainer

from layerswap.ground.errors import TrainingError, one_line
from layerswap.training.expert.head import ADVICE


class OpenTrainer(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that tokenizes further data sets."""

    def prepared(self, rows: Any, name: str) -> Any:
        """Tokenize a data set as SFTTrainer does its own; `name` is `train` or `eval`."""
        packing = self.args.packing
        if name == "eval" and self.args.eval_packing is not None:
            packing = self.args.eval_packing
        given = {
            "dataset": rows, "processing_class": self.processing_class, "args": self.args,
            "packing": packing, "formatting_func": None, "dataset_name": name,
        }  # fmt: skip
        try:
            prepare = self._prepare_dataset
            inspect.signature(prepare).bind(**given)
        except (AttributeError, TypeError) as error:
            raise TrainingError(
                f"TRL cannot prepare a second data set ({one_line(error)}); {ADVICE}"
            ) from None
        return prepare(**given)
