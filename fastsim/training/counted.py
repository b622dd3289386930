"""A number with its noun, for lines that people read."""


def counted(number, one, many=None):
    """ "1 step", "1,000 steps". many: the plural, by default with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
