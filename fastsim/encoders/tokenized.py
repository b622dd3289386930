"""Tokenizes texts for a transformers model; the input of a model for no text."""

import torch


def tokenized(tokenizer, *texts, max_length):
    """The tensors of a list of texts, or of two lists of paired texts, padded to the longest.

    max_length: the number of tokens to which a text or pair is truncated, or None. Without texts
    the tensors have no rows.
    """
    if not texts[0]:
        # Tokenizers refuse an empty list.
        features = tokenized(tokenizer, *([""] for _ in texts), max_length=max_length)
        return {name: value[:0] for name, value in features.items()}

    def tensors(padding, limit):
        return dict(
            tokenizer(
                *texts,
                padding=padding,
                truncation=limit is not None,
                max_length=limit,
                return_tensors="pt",
            )
        )

    features = tensors(True, max_length)
    if features["input_ids"].shape[1] == 0:
        # No text has a token and the tokenizer adds none: use one token of padding.
        features = tensors("max_length", 1)
    return features


def stand_in(features):
    """The tensors of one row, in the shape of those of `tokenized` without rows.

    Transformers take at least one row. What they return for it is removed, but it depends on the
    weights, so that a rank without texts takes part in the backward pass.
    """
    rows = {name: value.new_zeros(1, *value.shape[1:]) for name, value in features.items()}
    return rows | {"attention_mask": torch.ones_like(rows["attention_mask"])}
