"""Options that several commands have."""

import click

from fastsim.cli.command import Prompt, by_name
from fastsim.encoders.names import EMBEDDED
from fastsim.training.options import LARGEST_SEED
from fastsim.training.rows import KINDS

# A name of a file or folder, at which the command looks itself.
PLACE = click.Path(readable=False)
MODEL_OPTION = click.option(
    "--model",
    default=EMBEDDED,
    metavar="NAME",
    type=PLACE,
    help="A folder, a name on the hub, or the bundled model.",
)
FORMATS_HELP = (
    "CSV, TSV, JSON or JSON lines, plain or .gz; Parquet; or a data set on the hub: hub:NAME,"
    " hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT."
)
CORPUS_HELP = (
    "the lines of a .txt file, or the column text of a data file or of a data set on the hub."
)
COLUMNS_HELP = (
    "The file's columns in their order, such as sentence1,sentence2,score. If the header has other"
    " names: sentence1=first,sentence2=second,score=gold."
)
_FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(list(KINDS)),
    help="Format of all data files. Default: of each what its suffix says.",
)
_DELIMITER = click.option(
    "--delimiter", metavar="SIGN", help="Delimiter of a CSV file. Default: a comma."
)
_HEADER = click.option(
    "--header/--no-header",
    default=None,
    help="Whether line 1 names the columns. Default: guessed from the line and --columns.",
)


def file_format(command):
    """How data files are read: kind, delimiter and header."""
    return _FORMAT(_DELIMITER(_HEADER(command)))


def _prompt(of):
    """--prompt. of: the texts that it is put before."""
    return click.option(
        "--prompt",
        "prompts",
        type=Prompt(),
        multiple=True,
        callback=by_name,
        help=f'A text put before each {of}. Example: --prompt query="query: ". May be repeated.',
    )


PROMPT = _prompt(
    "text of a column: query (anchors), document (positives and negatives) or a column's name"
)
SEARCH_PROMPT = _prompt("query or document; the queries of pairs are their anchors")
SEED = click.option(
    "--seed", type=click.IntRange(0, LARGEST_SEED), default=0, help="Seed of all random numbers."
)
TRUST = click.option("--trust-remote-code", is_flag=True, help="Run code from the model's folder.")
PICKLE = click.option(
    "--allow-pickle", is_flag=True, help="Read weights in pickle files, which can run code."
)
ENCODED_AT_ONCE = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    metavar="TEXTS",
    help="Texts encoded at once.",
)
MAX_LENGTH = click.option(
    "--max-length",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Truncate texts to this many tokens. Default: the model's limit.",
)
CPU = click.option("--cpu", is_flag=True, help="Use the CPU even if there is a GPU.")
