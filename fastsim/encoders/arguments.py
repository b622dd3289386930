"""What an encoder is given, checked."""


def longest(model, tokenizer, max_length=None, *, pair=False):
    """Tokens that a text, or a pair of texts, may have: max_length, else what model and tokenizer
    allow, or None where neither says. ValueError for a max_length that leaves a text no token, or
    is more than they allow.
    """
    most = _most(model, tokenizer)
    if max_length is None:
        return most if most < 10**6 else None
    # Told to cut below its special tokens, a tokenizer cuts nothing.
    least = tokenizer.num_special_tokens_to_add(pair=pair) + 1 + pair
    if not isinstance(max_length, int) or not least <= max_length <= most:
        wanted = f"{least} to {most} tokens" if most < 10**6 else f"at least {least} tokens"
        raise ValueError(f"max_length: wanted {wanted}, got {max_length!r}")
    return max_length


def fitting_length(model, tokenizer, saved):
    """The length that a folder says, at most what model and tokenizer allow; None where it says
    none.
    """
    return None if saved is None else min(saved, _most(model, tokenizer))


def _most(model, tokenizer):
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet says -1: it has no limit
        return tokenizer.model_max_length
    return min(tokenizer.model_max_length, positions - _first_position(model))


def _first_position(model):
    """The position of a text's first token: of RoBERTa and its kin that after the padding's.

    These have the number of the padding beside their table of positions, and in it.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        positions = getattr(module, "position_embeddings", None)
        if padding is not None and getattr(positions, "padding_idx", None) == padding:
            return padding + 1
    return 0


def pad_with_end(tokenizer):
    """A tokenizer without a padding token pads with its end token; ValueError without either."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("tokenizer: wanted a padding or an end token, got neither")
        tokenizer.pad_token = tokenizer.eos_token


def checked_texts(name, texts):
    """An iterable of str as a list; TypeError for anything else."""
    if isinstance(texts, str):
        raise TypeError(f"{name}: wanted a list of str, got one str")
    texts = list(texts)
    others = [type(text).__name__ for text in texts if not isinstance(text, str)]
    if others:
        raise TypeError(f"{name}: wanted a list of str, got {others[0]} in it")
    return texts


def check_batch_size(batch_size):
    """ValueError for a batch of no texts."""
    if batch_size < 1:
        raise ValueError(f"batch_size: wanted at least 1, got {batch_size}")
