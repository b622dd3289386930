"""Optional features of a tile loss, besides its kind.

A call names the extras that it needs, a backend those that it supports (`Backend.extras`). A call
goes to a backend that supports all of its extras.
"""

from fastsim.groups import Ring

DOT = "dot products"
ABOVE = "exclusion by score"
GUIDE = "a guide"
GUIDED_POSITIVES = "guided positives"
COLUMN_BIAS = "column bias"
UNTARGETED = "log-sum-exps"
PARTS = "parts of the columns"
TEACHER = "teacher"
WEIGHED_POSITIVES = "weighed positives"

# Why a backend without this extra refuses a call.
EXTRAS = {
    DOT: 'its kernels do not support dot products (`similarity="dot"`)',
    ABOVE: "its kernels cannot exclude pairs by their score (`exclude_above`)",
    GUIDE: "its kernels cannot exclude pairs by the scores of a guide (`guide`)",
    GUIDED_POSITIVES: "its kernels would also exclude positives by a guide's scores (`guide`)",
    COLUMN_BIAS: "its kernels cannot add a bias to the logits of a column (`candidate_bias`)",
    UNTARGETED: "its kernels need a target for each row (`directions`, `references`)",
    PARTS: "its kernels need all columns, not a part of them (`group`)",
    TEACHER: "its kernels cannot compute the scores of a teacher (`distill`)",
    WEIGHED_POSITIVES: "its kernels cannot weigh positives (`positive_weight`)",
}


def extras_of(
    *,
    similarity="cosine",
    exclude_above=None,
    guide=None,
    candidate_bias=None,
    further=False,
    weighed=False,
    group=None,
):
    """The extras that a loss with these arguments needs.

    further: whether it has further candidates (fastsim/losses/further_candidates.py).
    weighed: whether the weight of positives may differ from 1.
    group: the `group` of the loss, if it needs the index of a column among those of all ranks;
        otherwise None. For a ring, `extras_of_ring` adds the extra in any case.
    """
    needed = {
        DOT: similarity == "dot",
        ABOVE: exclude_above is not None,
        GUIDE: guide is not None,
        GUIDED_POSITIVES: guide is not None,
        COLUMN_BIAS: candidate_bias is not None,
        UNTARGETED: further,
        PARTS: group is not None,
        WEIGHED_POSITIVES: weighed,
    }
    return tuple(extra for extra, is_needed in needed.items() if is_needed)


def extras_of_ring(group):
    """The extras that a ring needs, as it sends the columns in parts."""
    return (PARTS,) if isinstance(group, Ring) else ()
