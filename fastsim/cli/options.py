"""Options that several commands have."""

import click

from fastsim.cli.command import Prompt, by_name
from fastsim.encoders.names import EMBEDDED
from fastsim.training.options import LARGEST_SEED
from fastsim.training.rows import KINDS

# The name of a file or folder. click does not check it: the command does, with its own message.
PLACE = click.Path(readable=False)
MODEL_OPTION = click.option(
    "--model",
    default=EMBEDDED,
    metavar="NAME",
    type=PLACE,
    help="Model: a folder, a name on the Hugging Face hub, or the bundled model.",
)
DATA_HELP = (
    "a file in CSV, TSV, JSON or JSON lines (plain or .gz) or Parquet, or a data set on the Hugging"
    " Face hub (hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT)."
)
CORPUS_HELP = "the lines of a .txt file, or the column text of a data file or hub data set."
COLUMNS_HELP = (
    "Columns of the file in order, such as sentence1,sentence2,score, with _ for one that is not"
    " used; or, if the header has other names, sentence1=first,sentence2=second,score=gold."
    " Default: the names in the header."
)
_FORMAT = click.option(
    "--format",
    "kind",
    type=click.Choice(list(KINDS)),
    help="Format of all data files. Default: by the suffix of each file.",
)
_DELIMITER = click.option(
    "--delimiter",
    metavar="CHARACTER",
    help="Delimiter of CSV files, such as ; or \\t for a tab. Default: a comma.",
)
_HEADER = click.option(
    "--header/--no-header",
    default=None,
    help="Whether line 1 is a header. Default: guessed from the line and --columns.",
)


def file_format(command):
    """Adds the options that say how data files are read: format, delimiter and header."""
    return _FORMAT(_DELIMITER(_HEADER(command)))


def _prompt(texts):
    """The option --prompt. texts: which texts get the prompt, for the help."""
    return click.option(
        "--prompt",
        "prompts",
        type=Prompt(),
        multiple=True,
        callback=by_name,
        help=f'Text put before each {texts}. Example: --prompt query="query: ". May be repeated.',
    )


PROMPT = _prompt(
    "text of a column; NAME is query (anchors), document (positives and negatives) or a column's"
    " name"
)
SEARCH_PROMPT = _prompt("query or document; NAME is query (anchors of pairs too) or document")
SEED = click.option(
    "--seed",
    type=click.IntRange(0, LARGEST_SEED),
    metavar="NUMBER",
    default=0,
    help="Seed of all random numbers.",
)
TRUST = click.option(
    "--trust-remote-code", is_flag=True, help="Allow Python code from the model's folder to run."
)
PICKLE = click.option(
    "--allow-pickle", is_flag=True, help="Allow weights in pickle files, which can run any code."
)
ENCODING_BATCH = click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=32,
    metavar="TEXTS",
    help="Encode this many texts at a time.",
)
MAX_LENGTH = click.option(
    "--max-length",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="Truncate texts to this many tokens. Default: the model's limit.",
)
CPU = click.option("--cpu", is_flag=True, help="Use the CPU even if there is a GPU.")
