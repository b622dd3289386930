"""The losses of open_clip without the N x N logits: change the import, keep everything else.

    from fastsim.integrations.open_clip import ClipLoss, SigLipLoss, create_loss

Each is a subclass of open_clip's class of that name, 3.3 or later, with its arguments, defaults and
results; every other name is open_clip's. Image and text features are taken as they are, normalised
or not; `logit_scale` arrives exponentiated, and has its gradient. In several processes the features
of all are gathered: what each rank keeps is N x D, not N x N.

Where a method of theirs that makes the logits is replaced, by a subclass or on the object, their
code runs, and a warning says so once. Refused: `local_loss` without `gather_with_grad`, which there
leaves out the gradient of every feature as somebody else's negative.
"""

from fastsim.integrations import names
from fastsim.integrations.open_clip import peer
from fastsim.integrations.open_clip.clip import ClipLoss, CoCaLoss
from fastsim.integrations.open_clip.distill import DistillClipLoss
from fastsim.integrations.open_clip.siglip import SigLipLoss

_KINDS = ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss
_OURS = {getattr(peer.losses(), kind.__name__): kind for kind in _KINDS}


def create_loss(args):
    """The loss that open_clip makes of its training arguments, as one of ours where there is one.

    ImportError where open_clip cannot be imported whole. ValueError as the classes.
    """
    loss = peer.package().create_loss(args)
    ours = _OURS.get(type(loss))
    if ours is not None:
        loss.__class__ = ours  # the same attributes: ours have none beyond theirs
        loss.check_options()
    return loss


__getattr__, __dir__, __all__ = names.served(__name__, peer.losses(), peer.package)
__all__ += ["create_loss"]
