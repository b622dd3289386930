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
