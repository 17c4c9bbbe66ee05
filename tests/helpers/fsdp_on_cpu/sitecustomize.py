"""Shim for tests: lets accelerate run FSDP2 over gloo on CPUs, which it runs as plain DDP.

Python imports this module at its start if its folder is on PYTHONPATH.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


def patch(state):
    init = state.AcceleratorState.__init__

    def shard(self, *args, fsdp_plugin=None, **kwargs):
        first = not self.__class__._shared_state
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        cpus = self.distributed_type == state.DistributedType.MULTI_CPU
        if first and cpus and fsdp_plugin is not None:
            self.distributed_type = state.DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = shard


class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "accelerate.state":
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    sys.meta_path.insert(0, Finder())
