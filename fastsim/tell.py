"""The default output of lines for the user."""

import sys


def tell(line):
    """Prints a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
