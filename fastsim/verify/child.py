"""python -m fastsim.verify.child PART BACKEND KIND DTYPE DEVICE PRECISION [MODULE], in a process.

PART: "refusal", whether the kernel is right, or "ratio", how fast it is. PRECISION is that of
float32 products, which a new process does not have from its parent. MODULE is imported first: a
backend from elsewhere registers itself there. Each line of the output names the step that begins;
the last one is [reason to refuse the kernel, ratio] as JSON, null for what there is not.
"""

import importlib
import json
import sys
from functools import partial

import torch

from fastsim.verify import checks


def main(part, backend, kind, dtype, device, precision, module=None):
    """Does that part of a check, and prints."""
    torch.set_float32_matmul_precision(precision)
    if module is not None:
        importlib.import_module(module)
    place = backend, kind, getattr(torch, dtype), torch.device(device), partial(print, flush=True)
    try:
        if part == "refusal":
            found = checks.refusal(*place), None
        else:
            found = None, checks.ratio(*place)
    except Exception as error:  # of any kind: a backend that raises is not right
        lines = str(error).strip().splitlines() or [""]
        found = f"{type(error).__name__}: {lines[0]}"[:300], None
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
