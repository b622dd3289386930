"""Checks that the packages for training are installed and recent enough, by fastsim's metadata."""

from importlib.metadata import PackageNotFoundError, requires, version

DISTRIBUTION, EXTRA = "fastsim-losses", "train"


def check_packages():
    """ImportError for a package that is missing or too old for the extra `train`.

    pip does not check these packages for a plain `fastsim-losses`, so an environment may have older
    versions. Some older versions do train, but with different gradients.
    """
    from packaging.requirements import Requirement  # transformers brings it

    try:
        needed = map(Requirement, requires(DISTRIBUTION) or ())
    except PackageNotFoundError:  # not installed: run from the sources
        return
    for package in needed:
        if package.marker is None or not package.marker.evaluate({"extra": EXTRA}):
            continue
        installed = _installed(package.name)
        if installed is None or not package.specifier.contains(installed, prereleases=True):
            wanted = package.specifier or "any version"
            raise ImportError(
                f"{package.name}: wanted {wanted}, got {installed or 'none'};"
                f" pip install '{DISTRIBUTION}[{EXTRA}]'"
            )


def _installed(name):
    """The version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
