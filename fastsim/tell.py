"""Where lines for the user go, unless a caller wants them elsewhere."""

import sys


def tell(line):
    """A line on the error stream, at once."""
    print(line, file=sys.stderr, flush=True)
