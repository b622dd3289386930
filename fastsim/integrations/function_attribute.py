"""Losses of a peer that call a function which is one of their attributes, such as a score."""


class FunctionAttribute:
    """Mixed in before a loss of a peer: one of its function attributes is replaced by ours.

    `function_attribute` is its name. Whenever the attribute is set to a function of the peer, the
    fused function takes its place, if there is one.
    """

    function_attribute = None

    @staticmethod
    def fused_function(function):
        """Our function in the place of `function`, or `function` itself."""
        raise NotImplementedError

    def __setattr__(self, name, value):
        if name == self.function_attribute:
            value = self.fused_function(value)
        super().__setattr__(name, value)
