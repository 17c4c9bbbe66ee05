"""A second device for PyTorch in host memory, to find code that mixes devices.

Importing registers it as `torch.accelerator`'s device `second`, after a build of a minute that is
kept for the machine. `allow("float64", False)` takes a dtype away, which Apple's mps lacks.
`used_bytes()` counts its memory, of which it has `TOTAL` bytes.
"""

from __future__ import annotations

import hashlib
import tempfile
import types
from pathlib import Path

import torch

NAME = "second"
TOTAL = 1 << 30
SOURCE = Path(__file__).parent / "device.cpp"


def _build() -> types.ModuleType:
    from torch.utils.cpp_extension import load

    version = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"layerswap-second-device-{version}"
    folder.mkdir(exist_ok=True)
    return load("second_device_c", [str(SOURCE)], build_directory=str(folder),
                extra_cflags=["-O1", "-w"])  # fmt: skip


def _module() -> types.ModuleType:
    """What a device's module of torch has; see `torch.utils.rename_privateuse1_backend`."""
    module = types.ModuleType(f"torch.{NAME}")
    facts = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "_is_in_bad_fork": False, "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
    }  # fmt: skip
    for name, value in facts.items():
        setattr(module, name, lambda *_, value=value: value)
    for name in ("set_device", "manual_seed", "manual_seed_all", "synchronize", "empty_cache"):
        setattr(module, name, lambda *_: None)
    module.get_rng_state = lambda *_: torch.empty(0, dtype=torch.uint8)  # type: ignore[attr-defined]
    module.set_rng_state = lambda *_: None  # type: ignore[attr-defined]
    module.mem_get_info = lambda *_: (TOTAL - used_bytes(), TOTAL)  # type: ignore[attr-defined]
    return module


torch.utils.rename_privateuse1_backend(NAME)
_device = _build()
_device.register_hooks()
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
used_bytes, operations, allow = _device.used_bytes, _device.operations, _device.allow
"""Bytes in use, operations so far, and a function that gives or takes a dtype."""
