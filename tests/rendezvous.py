"""Where the processes of a group find each other: a store in this process, as in torchrun's.

It has its port from the moment that one is chosen. A port that is looked up, left and told to the
processes may be another program's by the time that they listen.
"""

import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def rendezvous(count):
    """The environment of `count` processes, but for their ranks; the store lasts as the block."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else the first process would start one
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    del store
