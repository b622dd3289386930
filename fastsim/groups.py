"""The values of `group=` of a loss: a process group, a mesh, a `Ring`, or the name of a group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ring:
    """A process group among whose ranks the columns travel, for columns that do not fit at once.

    Use it as `group=` of a loss: `fastsim.info_nce(x, y, group=Ring(group))`. A rank then holds the
    columns of a few ranks, never of all, but computes the scores twice: see fastsim/distributed.py.
    """

    group: object


@dataclass(frozen=True)
class NamedGroup:
    """The name of a process group, for modules: unlike the group it can be copied and saved."""

    name: str


def all_gather(out, part, group):
    """Gathers the parts of all ranks, of equal size, into `out`."""
    # torch 2.13 has renamed it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def exchange_device(group):
    """The device on which ranks exchange numbers of the host: the CPU if the group supports it.

    It depends on the group alone, as a rank whose arguments are no tensors has to know it too.
    """
    devices = group._device_types
    on_cpu = not devices or any(device.type == "cpu" for device in devices)
    return torch.device("cpu") if on_cpu else devices[0]


def named(group):
    """A loss's `group=` with the group replaced by its name."""
    name = process_group(group).group_name
    return Ring(NamedGroup(name)) if isinstance(group, Ring) else NamedGroup(name)


def process_group(group):
    """The process group of a loss's `group=`, which is a group, a ring, a name or a 1-d mesh.

    Raises a ValueError for a mesh of several dimensions, a TypeError for anything else.
    """
    group = group.group if isinstance(group, Ring) else group
    if isinstance(group, NamedGroup):
        return dist.distributed_c10d._resolve_process_group(group.name)
    if isinstance(group, getattr(dist, "ProcessGroup", ())):
        return group
    mesh = getattr(dist, "device_mesh", None)
    if mesh is not None and isinstance(group, mesh.DeviceMesh):
        if group.ndim > 1:
            names = ", ".join(map(repr, group.mesh_dim_names or ("name",)))
            raise ValueError(
                f"group: wanted a mesh of one dimension, got {group.ndim};"
                f" mesh.get_group(name) picks one, name being one of {names}"
            )
        return group.get_group()
    raise TypeError(
        "group: wanted a torch.distributed process group that this process is in, a DeviceMesh,"
        f" Ring(group) or None, got {group!r}"
    )
