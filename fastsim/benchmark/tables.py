"""The figures of a run as text for a terminal."""

from fastsim.benchmark.cases import CASES
from fastsim.benchmark.found import BOTH, Found

_LAYOUT = "  {:<28} {:>12} {:>12} {:>8} {:>15} {:>8} {:>10}"


def text(about, rows):
    """A table per loss and size: ms, times as long as fastsim, share of the ceiling, memory."""
    found = Found(about, rows)
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
        absent = {name: bool(found.reason("time", loss, name, n, width)) for name in names}
        lines += [_line(found, loss, name, n, width) for name in sorted(names, key=absent.get)]
    lines += ["", *_errors(rows)]
    return "\n".join(lines)


def _line(found, loss, name, n, width):
    place = (loss, name, n, width)
    ours = found.ours(loss, n, width)
    ratio = found.ratio(loss, name, ours, n, width) if ours else None
    share, memory = found.share(CASES[loss], name, n, width), found.memory.get(place)
    cells = [
        _cell(found.best(*place, "forward"), ",.3f"),
        _cell(found.best(*place, BOTH), ",.3f"),
        _cell(ratio and ratio[0], ".2f"),
        "" if ratio is None or name == ours else "{1:.2f} to {2:.2f}".format(*ratio),
        _cell(share, ".0%"),
        _cell(memory, ",.1f"),
    ]
    why = [found.reason(measure, *place) for measure in ("time", "memory")]
    notes = "; ".join(dict.fromkeys(filter(None, why)))
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
        what = f"{row['loss']}, {row['implementation']}"
        if "temperature" in row["options"]:
            what += f", temperature {row['options']['temperature']:g}"
        yield f"  {what:<62} {row['loss error']:>10.2e} {row['gradient error']:>10.2e}"
