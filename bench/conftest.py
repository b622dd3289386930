"""Options of `pytest bench`."""


def _integers(text):
    return tuple(int(part) for part in text.split(","))


def pytest_addoption(parser):
    group = parser.getgroup("fastsim")
    group.addoption("--sizes", type=_integers, default=(64, 512, 2048), help="Batch sizes N,N,...")
    group.addoption("--dims", type=_integers, default=(384,), help="Widths D,D,...")
    group.addoption("--device", default="cpu", help="Device: cpu or cuda.")
