"""Full triplet: hinges on the mean negative and on the closest; see `full_triplet`."""

from fastsim.kinds.kind import Kind


class Triplet(Kind):
    """It keeps no state, as it is only computed in one call (`Backend.in_one_call`).

    Larger matrices use a selection and products of rows, without score gradients.
    """

    parameters = ("margin",)
    learns = ()
    in_panels = False

    def __init__(self, mining):
        self.name = f"{mining}_triplet"


KINDS = (Triplet("hard"), Triplet("semi-hard"))
