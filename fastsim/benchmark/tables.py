"""The measurements of a run as text for a terminal."""

from fastsim.benchmark.cases import CASES
from fastsim.benchmark.measurements import BOTH, Measurements

_LAYOUT = "  {:<28} {:>12} {:>12} {:>8} {:>15} {:>8} {:>10}"


def text(about, rows):
    """A table for each loss and size: times, ratios to fastsim, shares of the ceiling, memory."""
    measurements = Measurements(about, rows)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    lines = [f"{about['device']}, commit {about['commit'] or 'unknown'}", versions]
    places = dict.fromkeys(
        (row["loss"], row["rows"], row["width"])
        for row in rows
        if row["measure"] in ("time", "memory")
    )
    head = ("", "forward ms", "and back ms", "ratio", "spread", "ceiling", "memory MB")
    for loss, n, width in sorted(places, key=lambda p: (list(CASES).index(p[0]), p[1:])):
        lines += ["", f"{loss}, {n:,} x {width}", _LAYOUT.format(*head)]
        names = dict.fromkeys(
            row["implementation"]
            for row in rows
            if (row.get("loss"), row.get("rows"), row.get("width")) == (loss, n, width)
        )
        untimed = {name: bool(measurements.reason("time", loss, name, n, width)) for name in names}
        lines += [
            _line(measurements, loss, name, n, width) for name in sorted(names, key=untimed.get)
        ]
    lines += ["", *_errors(rows)]
    return "\n".join(lines)


def _line(measurements, loss, name, n, width):
    place = (loss, name, n, width)
    ours = measurements.ours(loss, n, width)
    ratio = measurements.ratio(loss, name, ours, n, width) if ours else None
    share, memory = measurements.share(CASES[loss], name, n, width), measurements.memory.get(place)
    cells = [
        _cell(measurements.best(*place, "forward"), ",.3f"),
        _cell(measurements.best(*place, BOTH), ",.3f"),
        _cell(ratio and ratio[0], ".2f"),
        "" if ratio is None or name == ours else "{1:.2f} to {2:.2f}".format(*ratio),
        _cell(share, ".0%"),
        _cell(memory, ",.1f"),
    ]
    reasons = [measurements.reason(measure, *place) for measure in ("time", "memory")]
    notes = "; ".join(dict.fromkeys(filter(None, reasons)))
    return _LAYOUT.format(name, *cells).rstrip() + (f"  {notes}" if notes else "")


def _cell(value, layout):
    return "" if value is None else format(value, layout)


def _errors(rows):
    rows = [row for row in rows if row["measure"] == "error" and "not measured" not in row]
    if not rows:
        return
    yield "errors relative to float64"
    yield f"  {'':<62} {'loss':>10} {'gradient':>10}"
    for row in rows:
        title = f"{row['loss']}, {row['implementation']}"
        if "temperature" in row["options"]:
            title += f", temperature {row['options']['temperature']:g}"
        yield f"  {title:<62} {row['loss error']:>10.2e} {row['gradient error']:>10.2e}"
