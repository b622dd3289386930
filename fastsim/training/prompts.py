"""Names of prompts: which texts a prompt can be put before."""

from fastsim.training.formats import is_role

PARTS = ("query", "document", "passage", "corpus")  # what sentence-transformers' models call them


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
