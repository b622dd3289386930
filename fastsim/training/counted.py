"""A number with its noun, for messages."""


def counted(number, one, many=None):
    """ "1 step" or "1,000 steps". many: the plural; None: the singular with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
