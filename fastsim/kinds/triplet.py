"""Full triplet: hinges on the mean negative and on the closest (the formula: `full_triplet`)."""

from fastsim.kinds.kind import Kind


class Triplet(Kind):
    """Of a matrix that a backend serves in one call (`Backend.whole`), so it keeps no state.

    Larger ones are made of a selection and of products of rows, without score gradients.
    """

    parameters = ("margin",)
    learns = ()
    in_panels = False

    def __init__(self, mining):
        self.name = f"{mining}_triplet"


KINDS = (Triplet("hard"), Triplet("semi-hard"))
