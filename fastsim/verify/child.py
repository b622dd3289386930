"""python -m fastsim.verify.child PART BACKEND KIND DTYPE DEVICE PRECISION [MODULE]

PART: "refusal", whether the kernel is correct, or "ratio", how fast it is. PRECISION: of float32
products, which a new process does not inherit. MODULE: imported first, to register a backend that
is not part of fastsim. Each line of the output names a step at its start; the last line is [reason
to refuse the kernel, ratio] as JSON, with null for what does not apply.
"""

import importlib
import json
import sys
from functools import partial

import torch

from fastsim.verify import checks


def main(part, backend, kind, dtype, device, precision, module=None):
    """Run this part of a check, and print its steps and its result."""
    torch.set_float32_matmul_precision(precision)
    if module is not None:
        importlib.import_module(module)
    arguments = backend, kind, getattr(torch, dtype), torch.device(device)
    report = partial(print, flush=True)
    try:
        if part == "refusal":
            result = checks.refusal(*arguments, report), None
        else:
            result = None, checks.ratio(*arguments, report)
    except Exception as error:  # any error means that the backend is not correct
        lines = str(error).strip().splitlines() or [""]
        result = f"{type(error).__name__}: {lines[0]}"[:300], None
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
