"""Regression on the cosine, Sentence-BERT's regression objective.

    L_i = (cos(u_i, v_i) - label_i)^2

Source: Reimers and Gurevych 2019, "Sentence-BERT", section 3. `cosent` trains the order of the
cosines instead of their values.
"""

from fastsim.checks import check_embeddings, check_labels, check_reduction
from fastsim.losses.module import LossModule
from fastsim.losses.reduce import reduce
from fastsim.scores import paired_cosine_similarity


def cosine_regression(u, v, labels, *, reduction="mean", backend=None):
    """Squared error of the cosines of paired rows u, v (N, D) against labels (N,) in [-1, 1].

    Returns a scalar, or (N,) for reduction "none". ValueError or TypeError for arguments that do
    not fit. Source: see the module.
    """
    check_embeddings("u", u)
    check_labels("labels", labels, u.shape[0], u.device)
    check_reduction(reduction)
    cosines = paired_cosine_similarity(u, v, backend=backend)
    return reduce((cosines - labels.to(cosines.dtype)) ** 2, reduction)


class CosineRegression(LossModule):
    """The module of `cosine_regression`."""

    function = staticmethod(cosine_regression)
