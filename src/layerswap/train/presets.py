"""Hyperparameters of the papers, under the names of TRL's `SFTConfig`.

Paper 1, table 4 ("Hyperparameters for the training runs that led to each of our experts"), and
paper 2, appendix A.4. What the papers do not say is TRL's default, but for one epoch (paper 2,
section 3.4). Table 4 does not say for how long the stable schedule decays; TRL needs a number, and
the last tenth of the steps is ours (Hägele et al., 2024, find 10 to 20%).
"""

from __future__ import annotations

from typing import Any

DECAY = "decay"
"""Share of the steps over which warmup-stable-decay falls; ours, and no name of TRL's."""


def _rows(text: str) -> dict[str, dict[str, Any]]:
    return {name: _row(*values) for name, *values in map(str.split, text.strip().splitlines())}


def _row(*values: str) -> dict[str, Any]:
    rate, batch, length, decay, clip, schedule, warmup, beta2 = values
    return {
        "learning_rate": float(rate),
        "per_device_train_batch_size": int(batch),
        "max_length": int(length),
        "weight_decay": float(decay),
        "max_grad_norm": float(clip),
        "lr_scheduler_type": "linear" if schedule == "Linear" else "warmup_stable_decay",
        "warmup_steps": int(warmup),
        "adam_beta2": float(beta2),
        **({DECAY: 0.1} if schedule == "WSD" else {}),
    }


_TABLE_4 = """
math-1  2e-8  4  2048  0.1   1.0  Linear  1000  0.99
math-2  1e-7  4  2048  0.01  0.5  Linear  1000  0.99
math-3  4e-8  4  2048  0.1   1.0  Linear  500   0.999
jpn-1   1e-7  8  1024  0.1   0.5  WSD     1000  0.995
jpn-2   1e-7  8  1024  0.1   0.5  WSD     1000  0.99
jpn-3   2e-7  8  1024  0.01  0.5  WSD     1000  0.99
swh-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
swh-2   2e-7  8  1024  0.05  0.5  WSD     1000  0.99
swh-3   1e-7  8  1024  0.1   1.0  WSD     1000  0.999
tel-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
tel-2   5e-8  8  1024  0.05  0.5  WSD     300   0.99
tel-3   1e-7  4  2048  0.1   0.5  WSD     1000  0.99
ben-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
ben-2   5e-8  8  1024  0.05  0.5  WSD     300   0.99
ben-3   1e-7  4  2048  0.1   0.5  WSD     1000  0.99
"""

PRESETS: dict[str, dict[str, Any]] = {
    **_rows(_TABLE_4),
    "unreasonable": {"max_length": 1024},
    "unreasonable-simultaneous": {
        "max_length": 1024,
        "lr_scheduler_type": "constant_with_warmup",
    },
}
"""By name. Paper 2's have no rate and no clipping norm: its published text has lost them."""

EFFECTIVE_BATCH = {"unreasonable": 32, "unreasonable-simultaneous": 64}
"""Examples in an optimiser step, where the paper says it (paper 2, appendix A.4)."""
