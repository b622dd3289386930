"""A number with its noun, for messages."""


def counted(number, one, many=None):
    """ "1 step", "1,000 steps". many: the plural, by default with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
