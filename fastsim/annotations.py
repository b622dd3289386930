"""Types of the arguments that several public functions share."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from fastsim.groups import Ring

# A number, or a tensor of one, shape () or (1,), that may require a gradient. FSDP2 shards no
# parameter of shape ().
Scalar: TypeAlias = "float | Tensor"
Reduction: TypeAlias = Literal["mean", "sum", "none"]
Similarity: TypeAlias = Literal["cosine", "dot"]
Mining: TypeAlias = Literal["semi-hard", "hard"]
# (row_ids (N,), column_ids (M,)), integers.
Exclude: TypeAlias = "tuple[Tensor, Tensor] | None"
# A matrix (N, M); (row_groups (N,), column_groups (M,)), integers; or None for the diagonal.
Targets: TypeAlias = "Tensor | tuple[Tensor, Tensor] | None"
# A process group whose ranks each give a part of the batch, or a `Ring` of one.
Group: TypeAlias = "ProcessGroup | DeviceMesh | Ring | None"
