"""Looks up the measurements of a run: times, ratios with their spread, memory."""

BOTH = "forward + backward"


class Measurements:
    """The rows of a result file, found by loss, implementation, N and width.

    A time is the best of all rounds. Its repeats are the best times of each process, or of each
    part of a run in one process; its spread is from the best to the worst repeat. The spread of a
    ratio is from one implementation's best over the other's worst to its worst over the other's
    best.
    """

    def __init__(self, about, rows):
        self.about, self.rows = about, rows
        self.times, self.memory, self.why, self.rates = {}, {}, {}, {}
        for row in rows:
            key = tuple(row.get(name) for name in ("loss", "implementation", "rows", "width"))
            if "not measured" in row:
                self.why[(row["measure"], *key)] = row["not measured"]
            elif row["measure"] == "time":
                self.times[(*key, row["pass"])] = row["repeats ms"]
            elif row["measure"] == "memory":
                self.memory[key] = row["rise MB"]
            elif row.get("name") == "products":
                self.rates[row["rows"], row["width"]] = row["GFLOP/s"]

    def ours(self, loss, rows, width, which=BOTH):
        """The name of fastsim's first backend that was timed there, or None."""
        for place in self.times:
            name = place[1]
            if name.startswith("fastsim ") and place == (loss, name, rows, width, which):
                return name
        return None

    def best(self, loss, name, rows, width, which=BOTH):
        """The time in milliseconds, or None."""
        repeats = self.times.get((loss, name, rows, width, which))
        return min(repeats) if repeats else None

    def ratio(self, loss, name, other, rows, width, which=BOTH):
        """The time of `name` over that of `other`: (value, least, most), or None."""
        times, base = (self.times.get((loss, n, rows, width, which)) for n in (name, other))
        if not (times and base):
            return None
        return min(times) / min(base), min(times) / max(base), max(times) / min(base)

    def share(self, case, name, rows, width):
        """The rate of the loss's least work over the measured rate of its products, or None."""
        best, rate = self.best(case.name, name, rows, width), self.rates.get((rows, width))
        if best is None or rate is None or not case.products[1]:
            return None
        return case.flop(rows, width) / (1e6 * best) / rate

    def reason(self, measure, loss, name, rows, width):
        """The reason why a figure is missing; "" if it was not to be measured."""
        return self.why.get((measure, loss, name, rows, width), "")
