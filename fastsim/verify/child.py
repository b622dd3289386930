"""python -m fastsim.verify.child BACKEND KIND DTYPE DEVICE PRECISION [MODULE]: one check, in here.

PRECISION is that of float32 products, which a new process does not have from its parent. MODULE is
imported first: a backend from elsewhere registers itself there. Each line of the output names the
step that begins; the last one is [served, reason, ratio] as JSON.
"""

import importlib
import json
import sys
from functools import partial

import torch

from fastsim.verify import checks


def main(backend, kind, dtype, device, precision, module=None):
    """Checks and prints."""
    torch.set_float32_matmul_precision(precision)
    if module is not None:
        importlib.import_module(module)
    try:
        place = backend, kind, getattr(torch, dtype), torch.device(device)
        found = checks.verdict(*place, told=partial(print, flush=True))
    except Exception as error:  # of any kind: a backend that raises is not right
        lines = str(error).strip().splitlines() or [""]
        found = False, f"{type(error).__name__}: {lines[0]}"[:300], None
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
