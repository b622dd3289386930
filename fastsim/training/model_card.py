"""The README.md of a trained model: its data, loss and metrics, and how to use it."""

from pathlib import Path

from fastsim.training.counted import counted
from fastsim.training.hub import is_hub

_SHOWN = 3


def model_card(result, encoder, name, *, cross=False):
    """Markdown with the metadata that the hub reads."""
    options, metric = result["options"], result["metric"]
    kind = "cross-encoder" if cross else "sentence-similarity"
    lines = ["---", "tags:", "- fastsim", "- sentence-transformers"]
    lines += [f"pipeline_tag: {'text-ranking' if cross else kind}"]
    lines += ["library_name: sentence-transformers", "---", "", f"# {name}", ""]
    lines += [f"Trained from `{options['model']}` with the loss `{options['loss']}` on"]
    lines += [
        f"{counted(result['rows'], 'row')} ({', '.join(result['columns'])}),"
        f" {counted(result['steps'], 'step')}"
    ]
    lines += [f"of {options['batch_size']} rows, learning rate {options['learning_rate']:g}.", ""]
    if result["after"]:
        lines += ["| metric | before | after |", "| --- | ---: | ---: |"]
        for key in main_metrics(result["after"], metric):
            lines += [f"| {key} | {result['before'][key]:.4f} | {result['after'][key]:.4f} |"]
        lines += ["", f"Measured on {_files(options['eval'])}.", ""]
    lines += ["## Use", "", "```python"]
    if cross:
        lines += ["from sentence_transformers import CrossEncoder", ""]
        lines += [f'model = CrossEncoder("{name}")', 'model.predict([("a text", "another")])']
    else:
        lines += ["from fastsim import Encoder", "", f'encoder = Encoder.from_pretrained("{name}")']
        call = "encode_query" if "query" in encoder.prompts else "encode"
        lines += [f'vectors = encoder.{call}(["a text"])  # (1, {encoder.encoded_dim})']
    lines += [
        "```",
        "",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
    ]
    return "\n".join(lines) + "\n"


def main_metrics(metrics, metric):
    """The metric that selected the model, and the first two of the other metrics."""
    others = [name for name in metrics if name != metric]
    return [metric, *others][:_SHOWN]


def _files(paths):
    paths = [paths] if isinstance(paths, str) else paths
    return ", ".join(f"`{path if is_hub(path) else Path(path).name}`" for path in paths)
