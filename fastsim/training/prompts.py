"""Names of prompts: which texts a prompt can be put before."""

from fastsim.training.formats import is_role

PARTS = ("query", "document", "passage", "corpus")  # what sentence-transformers' models call them
_SEARCHED = {"anchor": "query", "positive": "document"}  # columns that train a part of a search


def check_prompts(prompts):
    """Refuse a name that no column and no part of a search has: its prompt would never be used."""
    for name in prompts or {}:
        if name not in PARTS and not is_role(name):
            raise ValueError(
                f"prompt: wanted {', '.join(PARTS)} or the name of a column, such as anchor, got"
                f" {name!r}"
            )


def check_used(prompts, encoder, parts):
    """Refuse a prompt that an `Encoder` puts before no text of some columns or parts."""
    used = {encoder.prompt_name(part) or encoder.default_prompt for part in parts}
    for name in prompts or {}:
        if name not in used:
            raise ValueError(
                f"prompt: wanted one for a text of {', '.join(parts)}, got {name!r}, which is put"
                " before none of them"
            )


def name_parts(encoder, given):
    """Give the parts of a search the prompts of the columns that train them, where they have none.

    A search looks for the prompts of its parts alone. given: the prompts that a run was told,
    which stay; an empty one of the model's folder says no more than none.
    """
    for column, part in _SEARCHED.items():
        name = encoder.prompt_name(part)
        if column in encoder.prompts and name not in given and not encoder.prompts.get(name):
            encoder.prompts[name or part] = encoder.prompts[column]


def unsearched_prompts(encoder):
    """A sentence on prompts of columns that no part of a search has, or None."""
    names = [name for name in ("text", "sentence1", "sentence2") if encoder.prompts.get(name)]
    if not names or encoder.prompt_name("query") or encoder.prompt_name("document"):
        return None
    return (
        f"a search will not use that of {' and '.join(names)}, unless it is given one named query"
        " or document"
    )
