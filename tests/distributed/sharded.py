"""accelerate shards on accelerators alone; here its FSDP2 and DeepSpeed run on CPUs and gloo."""

import os
import sys

from accelerate import state
from accelerate.utils import DistributedType


def on_cpus():
    """From here on accelerate takes a configuration that shards on a CPU as on a GPU."""
    plain = state.AcceleratorState.__init__

    def init(self, *arguments, fsdp_plugin=None, deepspeed_plugin=None, **options):
        plugins = {"fsdp_plugin": fsdp_plugin, "deepspeed_plugin": deepspeed_plugin}
        plain(self, *arguments, **plugins, **options)
        if self.distributed_type != DistributedType.MULTI_CPU:
            return
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            self.distributed_type, self.deepspeed_plugins = (
                DistributedType.DEEPSPEED,
                deepspeed_plugin,
            )
            deepspeed_plugin.set_mixed_precision("no")
            deepspeed_plugin.select(_from_accelerator_state=True)
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.AcceleratorState.__init__ = init
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed  # noqa: F401 - without the exchange in shared memory that it would compile

        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
