"""The version of a GPU's driver, which torch does not tell."""

import ctypes
from pathlib import Path

import torch

NVIDIA = ("libnvidia-ml.so.1", "nvml.dll")  # NVIDIA's management library, part of each driver
AMD = Path("/sys/module/amdgpu/version")
LONGEST = 96  # characters; NVIDIA documents fewer


def version():
    """The version of the driver, such as "580.159.04", or "" if it is not known."""
    return _of_amd() if torch.version.hip else _of_nvidia()


def _of_amd():
    try:
        return AMD.read_text().strip()
    except OSError:  # the driver is part of the kernel
        return ""


def _of_nvidia():
    for name in NVIDIA:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        buffer = ctypes.create_string_buffer(LONGEST)
        if library.nvmlInit_v2() == 0:
            try:
                if library.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(LONGEST)) == 0:
                    return buffer.value.decode()
            finally:
                library.nvmlShutdown()
    return ""
