"""The figures of one run, looked up: times, ratios with their spread, memory, errors."""

BOTH = "forward + backward"


class Found:
    """Rows of a result file by what they are about.

    The best of the rounds is the time. Its spread is from the best to the worst of the repeats: the
    best times of each process, or of each part of a run in one. That of a ratio is from the best of
    the one to the worst of the other, and the other way round.
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
        """The first of fastsim's backends that was timed there, or None."""
        for place in self.times:
            name = place[1]
            if name.startswith("fastsim ") and place == (loss, name, rows, width, which):
                return name
        return None

    def best(self, loss, name, rows, width, which=BOTH):
        """Milliseconds, or None."""
        repeats = self.times.get((loss, name, rows, width, which))
        return min(repeats) if repeats else None

    def ratio(self, loss, name, other, rows, width, which=BOTH):
        """How many times as long as `other` takes `name`: (value, least, most), or None."""
        mine, theirs = (self.times.get((loss, n, rows, width, which)) for n in (name, other))
        if not (mine and theirs):
            return None
        value = min(mine) / min(theirs)
        return value, min(mine) / max(theirs), max(mine) / min(theirs)

    def share(self, case, name, rows, width):
        """Of the measured ceiling of the products, by the least work of the loss."""
        best, rate = self.best(case.name, name, rows, width), self.rates.get((rows, width))
        if best is None or rate is None or not case.products[1]:
            return None
        return case.flop(rows, width) / (1e6 * best) / rate

    def reason(self, measure, loss, name, rows, width):
        """Why a figure is missing, "" if it never was asked for."""
        return self.why.get((measure, loss, name, rows, width), "")
