"""DTensors as arguments of the batch-wise losses: replicated, or sharded by rows over a mesh.

A replicated DTensor counts as the tensor that it holds. A DTensor sharded by rows holds this rank's
part of a batch over the mesh, like a plain tensor with `group=`. The loss and its gradients are
those of the whole tensors. Plain tensors get `ranks` times their share of the gradient, because
DistributedDataParallel averages it; DTensors get their share itself.
"""

import torch

HINT = "x.full_tensor() is the whole of a DTensor x, x.to_local() this rank's part of it"

_PLAIN = (torch.Tensor, float, bool, str, type(None))  # the types of nearly all arguments


def is_dtensor(value):
    """Whether the value is a DTensor, found out without importing torch.distributed.tensor."""
    kind = type(value)
    return kind is not torch.Tensor and hasattr(kind, "full_tensor")


def any_dtensor(values):
    """Whether a DTensor is among the values, or in a tuple or list among them."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if any_dtensor(value) if kind in (tuple, list) else is_dtensor(value):
            return True
    return False


def local_arguments(arguments):
    """(arguments {name: value} with this rank's tensors, mesh, whether rows are sharded over it).

    Raises a ValueError or TypeError if a DTensor is neither replicated nor sharded by rows.
    """
    replicated, meshes, shapes = {}, {}, {}
    local = {
        name: _local(name, value, replicated, meshes, shapes) for name, value in arguments.items()
    }
    if not meshes:
        return local, next(iter(replicated.values())), False
    one = next(iter(meshes))
    if any(mesh != meshes[one] for mesh in meshes.values()):
        raise ValueError(f"{', '.join(meshes)}: wanted one mesh for all DTensors; {HINT}")
    for name, value in _tensors(local):
        if name not in meshes and value.dim():
            raise TypeError(
                f"{name}: wanted a DTensor that is sharded by rows, as {one} is,"
                f" got {'a replica' if name in replicated else 'a plain tensor'}; {HINT}"
            )
    if len(shapes.get("positives", ())) == 1:  # in full_triplet they are embeddings
        raise ValueError(
            "positives: cannot be combined with DTensors that are sharded by rows, where row i's"
            " positive is column i; for other positives use x.to_local() and group=, and count"
            " them within this rank's part"
        )
    rows = {name: shape[0] for name, shape in shapes.items() if len(shape) > 1}
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{count} in {name}" for name, count in rows.items())
        raise ValueError(
            f"{', '.join(rows)}: wanted DTensors of one number of rows, since each rank's part"
            f" counts by itself, got {shown}; x.to_local() and group= serve others"
        )
    return local, meshes[one], True


def _local(name, value, replicated, meshes, shapes):
    """The value with this rank's tensors for its DTensors.

    Fills in, by name: the meshes of replicated DTensors, the meshes and the whole shapes of those
    sharded by rows.
    """
    if type(value) in (tuple, list):
        return type(value)(
            _local(f"{name}[{i}]", part, replicated, meshes, shapes) for i, part in enumerate(value)
        )
    if not is_dtensor(value):
        return value
    mesh = value.device_mesh
    sharded = [i for i, placement in enumerate(value.placements) if not placement.is_replicate()]
    if not sharded:
        replicated[name] = mesh
        return value.to_local()
    by_rows = len(sharded) == 1 and value.dim() and value.placements[sharded[0]].is_shard(0)
    if not by_rows:
        raise ValueError(
            f"{name}: wanted a DTensor of replicas, or one that is sharded by rows over one"
            f" dimension of its mesh, got {value.placements}; {HINT}"
        )
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        raise ValueError(
            f"{name}: wanted a mesh of one dimension, or one with mesh_dim_names,"
            f" got {mesh.ndim} dimensions without names; {HINT}"
        )
    shapes[name] = value.shape
    meshes[name] = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[sharded[0]]]
    return value.to_local()


def _tensors(arguments):
    for name, value in arguments.items():
        parts = enumerate(value) if type(value) in (tuple, list) else [(None, value)]
        for i, part in parts:
            if isinstance(part, torch.Tensor):
                yield name if i is None else f"{name}[{i}]", part


def as_dtensor(result, mesh, sharded, rows, reduction):
    """The result of a loss on this rank, as a DTensor over the mesh.

    sharded: whether the rows are sharded over the mesh.
    rows: their number over all ranks.
    reduction: the reduction of the loss. A mean, or the one value of a loss over all pairs of
        pairs, is `ranks` times this rank's share, because plain tensors are averaged; a sum is not.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if isinstance(result, tuple):
        parts = (as_dtensor(part, mesh, sharded, rows, reduction) for part in result)
        return type(result)(*parts)
    if not sharded:
        return DTensor.from_local(result, mesh, [Replicate()] * mesh.ndim)
    if result.dim():
        shape = torch.Size((rows, *result.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(result, mesh, [Shard(0)], shape=shape, stride=stride)
    share = result if reduction == "sum" else result / mesh.size()
    return DTensor.from_local(share, mesh, [Partial()]).redistribute(placements=[Replicate()])
