"""Tokenizes texts for a transformers model."""


def tokenized(tokenizer, *texts, max_length):
    """The tensors of a list of texts, or of two lists of paired texts, padded to the longest.

    max_length: the number of tokens to which a text or pair is truncated, or None.
    """

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
