"""Whether the packages that training needs are there and recent enough, by our own metadata."""

from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION, EXTRA = "fastsim-losses", "train"


def check_packages():
    """ImportError that names a package which is missing, or older than the extra `train` asks for.

    pip looks at none of them for a plain `fastsim-losses`, so that an environment may hold an older
    one; and some older ones train, but with other gradients.
    """
    from packaging.requirements import Requirement  # transformers brings it

    try:
        needed = map(Requirement, requires(DISTRIBUTION) or ())
    except PackageNotFoundError:  # the sources alone
        return
    for package in needed:
        if package.marker is None or not package.marker.evaluate({"extra": EXTRA}):
            continue
        found = _installed(package.name)
        if found is None or not package.specifier.contains(found, prereleases=True):
            wanted = package.specifier or "any version"
            raise ImportError(
                f"{package.name}: wanted {wanted}, got {found or 'none'};"
                f" pip install '{DISTRIBUTION}[{EXTRA}]'"
            )


def _installed(name):
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
