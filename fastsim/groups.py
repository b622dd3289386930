"""What `group=` of a loss takes: a process group, a mesh, a ring around one, or the name of one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ring:
    """A process group around whose ranks columns travel, where they would not fit at once.

    As `group=` of a loss: `fastsim.info_nce(x, y, group=Ring(group))`. A rank then holds the
    columns of a few ranks, never all of them, but computes the scores twice: see
    fastsim/distributed.py.
    """

    group: object


@dataclass(frozen=True)
class NamedGroup:
    """A process group by its name, as a module that holds one is copied and saved."""

    name: str


def all_gather(out, part, group):
    """Parts of one size, of all ranks, into `out`; the name changed in torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, part, group=group)


def exchange_device(group):
    """Where tensors of host values travel, the same on every rank: the CPU where the group can.

    A rank that has been given no proper tensor has to know it too.
    """
    devices = group._device_types
    on_cpu = not devices or any(device.type == "cpu" for device in devices)
    return torch.device("cpu") if on_cpu else devices[0]


def named(group):
    """The group of a loss's `group=` by its name."""
    name = process_group(group).group_name
    return Ring(NamedGroup(name)) if isinstance(group, Ring) else NamedGroup(name)


def process_group(group):
    """The process group of a loss's `group=`: itself, a ring's, or that of a mesh of one dimension.

    TypeError for anything else, ValueError for a mesh of several dimensions.
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
