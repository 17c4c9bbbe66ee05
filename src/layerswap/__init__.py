"""layerswap: recompose fine-tuned language models layer by layer."""

from __future__ import annotations

__version__ = "0.1.0"
