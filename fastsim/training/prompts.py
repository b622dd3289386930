"""The names of prompts, which decide to which texts a prompt applies."""

from fastsim.training.formats import is_role

PARTS = ("query", "document", "passage", "corpus")  # names in models of sentence-transformers
# Column -> the part of a search that is trained by it.
_SEARCHED = {"anchor": "query", "positive": "document"}


def check_prompts(prompts):
    """Refuse a name that is neither a column nor a part of a search, and so is never used."""
    for name in prompts or {}:
        if name not in PARTS and not is_role(name):
            raise ValueError(
                f"prompt: wanted {', '.join(PARTS)} or the name of a column, such as anchor, got"
                f" {name!r}"
            )


def check_used(prompts, encoder, parts):
    """Refuse a prompt that an `Encoder` uses for none of these columns or parts."""
    used = {encoder.prompt_name(part) or encoder.default_prompt for part in parts}
    for name in prompts or {}:
        if name not in used:
            raise ValueError(
                f"prompt: wanted one that applies to {', '.join(parts)}, got {name!r}, which"
                " applies to none of them"
            )


def name_parts(encoder, given):
    """Give a part of a search without a prompt the prompt of the column that trains it.

    A search uses only the prompts of its parts. given: the prompts of the run, which are kept even
    if they are empty; an empty prompt in the model's folder counts as none.
    """
    for column, part in _SEARCHED.items():
        name = encoder.prompt_name(part)
        if column in encoder.prompts and name not in given and not encoder.prompts.get(name):
            encoder.prompts[name or part] = encoder.prompts[column]


def unsearched_prompts(encoder):
    """A note if a search will not use the prompts of columns, or None."""
    names = [name for name in ("text", "sentence1", "sentence2") if encoder.prompts.get(name)]
    if not names or encoder.prompt_name("query") or encoder.prompt_name("document"):
        return None
    return (
        f"a search will not use the prompt of {' and '.join(names)}, but only prompts named query"
        " and document"
    )
