"""The reference of the public names, from their docstrings: python .ci/reference.py FOLDER

A warning, such as a public name that does not exist, is an error.
"""

import builtins
import sys
import warnings
from pathlib import Path

import pdoc
import torch
from torch.distributed.device_mesh import DeviceMesh

import fastsim
from fastsim.encoders.encoder import Encoder
from fastsim.groups import Ring

MODULES = ("fastsim", "fastsim.grad_cache", "fastsim.distributed")

if __name__ == "__main__":
    warnings.simplefilter("error")
    fastsim.Encoder = Encoder  # imported on first use, which pdoc does not wait for
    # `fastsim.annotations` names them in strings, as torch can be built without them.
    builtins.ProcessGroup = torch.distributed.ProcessGroup
    builtins.DeviceMesh, builtins.Ring = DeviceMesh, Ring
    builtins.Tensor = torch.Tensor
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=Path(sys.argv[1]))
