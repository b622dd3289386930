"""Pictures of a training run: PNG files, drawn without a display."""

from pathlib import Path

from matplotlib.figure import Figure

WIDE = (8, 3.2)


def draw(history, metric, before, after, folder):
    """Draw all pictures of a run into a folder; before, after: results of `Task.sample`."""
    folder = Path(folder)
    curves(history, metric, folder / "curves.png")
    if "heat" in after:
        heat_maps(before["heat"], after["heat"], folder / "cosines.png")
    if "scores" in after:
        similarity(after["gold"], before["scores"], after["scores"], folder / "similarity.png")


def curves(history, metric, path):
    """The loss and a metric (or None) over the steps, from the log history of the trainer."""
    figure = Figure(figsize=WIDE, layout="constrained")
    shown = [("loss", "training loss")]
    shown += [] if metric is None else [(f"eval_{metric}", metric)]
    all_axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (key, name) in zip(all_axes, shown, strict=True):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None)
        else:
            axes.text(0.5, 0.5, "no values", ha="center", transform=axes.transAxes)
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
    return _save(figure, path)


def similarity(gold, before, after, path):
    """The similarity of pairs over their gold score, before and after training: lists (N,)."""
    figure = Figure(figsize=WIDE, layout="constrained")
    all_axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, values, title in zip(all_axes, (before, after), ("before", "after"), strict=True):
        axes.scatter(gold, values, s=8, alpha=0.4, linewidths=0)
        axes.set(xlabel="gold score", title=title)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("similarity")
    return _save(figure, path)


def heat_maps(before, after, path):
    """The cosines of first texts (rows) with second texts (columns), (N, M) each."""
    figure = Figure(figsize=WIDE, layout="constrained")
    all_axes = figure.subplots(1, 2)
    for axes, values, title in zip(all_axes, (before, after), ("before", "after"), strict=True):
        image = axes.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r")
        axes.set(title=title, xlabel="second text", ylabel="first text")
    figure.colorbar(image, ax=all_axes, label="cosine")
    return _save(figure, path)


def _save(figure, path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
