"""What the cases are made of: fresh embeddings, targets, groups and masks.

Of n rows, m columns and width d. A maker that takes d returns what a case does (`Case.make`), or
the embeddings alone; one that does not returns one argument of a loss.
"""

import torch

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def embeddings(*shape, generator):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def integers(high, *shape, generator):
    return torch.randint(0, high, shape, generator=generator)


def two_sides(n, m, d, generator):
    return [embeddings(n, d, generator=generator), embeddings(m, d, generator=generator)]


def ids(n, m, generator):
    count = max(2, n // 2)
    return integers(count, n, generator=generator), integers(count, m, generator=generator)


def groups(n, m, generator):
    return integers(3, n, generator=generator), integers(3, m, generator=generator)


def square_groups(n, m, generator):
    groups = integers(3, n, generator=generator)
    return groups, groups


def signs(n, m, generator):
    return integers(2, n, m, generator=generator).to(torch.int8) * 2 - 1


def soft_targets(n, m, generator):
    return (integers(5, n, m, generator=generator).to(torch.float32) - 2) / 2


def columns(n, m, generator):
    return integers(max(1, m), n, generator=generator)


def priors(n, m, generator):
    return 0.3 * torch.rand(n, generator=generator, dtype=torch.float64)


def guides(n, m, generator):
    return embeddings(n, 5, generator=generator), embeddings(m, 5, generator=generator)


def log_q(n, m, generator):
    return embeddings(m, generator=generator)


def transposed_targets(n, m, generator):
    return soft_targets(m, n, generator).to(torch.bfloat16).T


def one_group(n, m, d, generator):
    groups = integers(max(1, n // 3), n, generator=generator)
    return [embeddings(n, d, generator=generator)], [groups], {}


def labelled_scores(n, m, d, generator):
    count = n * 3
    labels = integers(4, count, generator=generator)
    return [embeddings(count, generator=generator).tanh()], [labels], {}


def ranked_scores(n, m, d, generator):
    count = n * 3
    return (
        [embeddings(count, generator=generator)],
        [torch.randperm(count, generator=generator).double()],
        {"scale": 3.0},
    )


def paired(n, d, generator):
    return [embeddings(n, d, generator=generator), embeddings(n, d, generator=generator)]


def labelled_pairs(n, m, d, generator):
    return paired(n, d, generator), [integers(4, n, generator=generator)], {}


def triplets(n, m, d, generator):
    return [*paired(n, d, generator), embeddings(n, d, generator=generator)], [], {}


def scored_pairs(n, m, d, generator):
    return paired(n, d, generator), [embeddings(n, generator=generator).tanh()], {}


def one_side(n, m, d, generator):
    return [embeddings(n, d, generator=generator), None]


def texts(n, m, d, generator):
    """Token embeddings of queries and documents."""
    return [embeddings(n, 3, d, generator=generator), embeddings(m, 5, d, generator=generator)]


def text_mask(side, length):
    """A mask that leaves every text a token, not always the first ones."""

    def mask(n, m, generator):
        kept = integers(3, (n, m)[side], length, generator=generator) > 0
        kept[:, length // 2] = True
        return kept

    return mask
