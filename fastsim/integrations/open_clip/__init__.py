"""The losses of open_clip without the N x N logits: change the import, keep everything else.

    from fastsim.integrations.open_clip import ClipLoss, SigLipLoss, create_loss

Each is a subclass of open_clip's class of that name (version 3.3 or later), with its arguments,
defaults and results. Every other name is open_clip's. Features are taken as they are, normalised
or not. `logit_scale` is the scale itself, not its logarithm, and gets a gradient. In several
processes the features are gathered: each rank keeps N x D numbers, not N x N.

If a method that makes the logits has been replaced, in a subclass or on the object, open_clip's
code computes the loss, and a warning says so once. `local_loss` without `gather_with_grad` is
refused: there, features get no gradient as candidates.
"""

from fastsim.integrations import names
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.clip import ClipLoss, CoCaLoss
from fastsim.integrations.open_clip.distill import DistillClipLoss
from fastsim.integrations.open_clip.siglip import SigLipLoss

_KINDS = ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss
_OURS = {getattr(peer.losses(), kind.__name__): kind for kind in _KINDS}


def create_loss(args):
    """The loss that open_clip creates for its training arguments, as our class where there is one.

    ImportError if open_clip cannot be imported. ValueError as from the classes.
    """
    loss = peer.package().create_loss(args)
    ours = _OURS.get(type(loss))
    if ours is not None:
        loss.__class__ = ours  # ours has no attributes beyond theirs
        loss.check_options()
    return loss


__getattr__, __dir__, __all__ = names.forwarding(__name__, peer.losses(), peer.package)
__all__ += ["create_loss"]
