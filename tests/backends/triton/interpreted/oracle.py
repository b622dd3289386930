"""The losses as plain loops over rows in float64, from the formulas alone; gradients by autograd.

Nothing of fastsim is imported. Each takes the matrix of cosines and returns the losses (N,), or ().
"""

import torch


def cosines(x, y):
    """Cosine of every pair of rows; a zero row has cosine 0 and gradient 0."""

    def unit(rows):
        return torch.stack([row / row.norm() if row.any() else 0 * row for row in rows])

    return unit(x) @ unit(y).T


def part_of(i, positives, exclude, columns):
    """The columns that take part in row i: their ids differ, or they are its positive."""
    return [
        j
        for j in range(columns)
        if exclude is None or exclude[0][i] != exclude[1][j] or j == positives[i]
    ]


def info_nce(s, positives, temperature, *, symmetric=False, exclude=None, margin=0.0, above=9.0):
    rows, columns = s.shape
    exclude = exclude and [ids.tolist() for ids in exclude]
    less = torch.zeros_like(s)
    for i, p in enumerate(positives):
        less[i, p] = margin
    z = (s - less) / temperature
    part = [part_of(i, positives, exclude, columns) for i in range(rows)]
    part = [[j for j in of if s[i, j] <= s[i, positives[i]] + above] for i, of in enumerate(part)]
    losses = []
    for i, p in enumerate(positives):
        loss = torch.logsumexp(z[i, part[i]], 0) - z[i, p]
        if symmetric:
            column = [k for k in range(rows) if p in part[k]]
            loss = 0.5 * (loss + torch.logsumexp(z[column, p], 0) - z[i, p])
        losses.append(loss)
    return torch.stack(losses)


def decoupled_contrastive(s, positives, temperature):
    losses = []
    for i, p in enumerate(positives):
        z = s[i] / temperature
        negatives = [j for j in range(s.shape[1]) if j != p]
        losses.append(torch.logsumexp(z[negatives], 0) - z[p] if negatives else 0 * z[p])
    return torch.stack(losses)


def sup_con(s, groups, temperature):
    losses = []
    for i in range(s.shape[0]):
        others = [j for j in range(s.shape[0]) if j != i]
        same = [j for j in others if groups[j] == groups[i]]
        z = s[i] / temperature
        if not same:
            losses.append(z.sum() * 0)
            continue
        losses.append(torch.logsumexp(z[others], 0) - z[same].mean())
    return torch.stack(losses)


def _sides_of(i, groups):
    others = [j for j in range(len(groups)) if j != i]
    same = [j for j in others if groups[j] == groups[i]]
    return same, [j for j in others if j not in same]


def nt_xent(s, groups, temperature):
    losses = []
    for i, z in enumerate(s / temperature):
        same, others = _sides_of(i, groups)
        terms = [torch.logsumexp(z[[p, *others]], 0) - z[p] for p in same]
        losses.append(sum(terms, z.sum() * 0))
    return torch.stack(losses)


def multi_similarity(s, groups, alpha, beta, base):
    losses = []
    for i, row in enumerate(s):
        same, others = _sides_of(i, groups)
        pull = torch.log1p(torch.exp(-alpha * (row[same] - base)).sum()) / alpha
        push = torch.log1p(torch.exp(beta * (row[others] - base)).sum()) / beta
        losses.append(pull + push)
    return torch.stack(losses)


def matrix_cross_entropy(s, targets, temperature):
    losses = []
    for row, wanted in zip(s / temperature, targets, strict=True):
        losses.append(-(wanted * (row - torch.logsumexp(row, 0))).sum())
    return torch.stack(losses)


def siglip(s, targets, scale, bias):
    soft = torch.nn.functional.softplus
    losses = []
    for row, wanted in zip(s * scale + bias, (targets + 1) / 2, strict=True):
        losses.append((wanted * soft(-row) + (1 - wanted) * soft(row)).sum())
    return torch.stack(losses)


def matrix_mse(s, targets):
    return torch.stack([((a - t) ** 2).mean() for a, t in zip(s, targets, strict=True)])


def full_triplet(s, margin, mining, exclude=None):
    rows, columns = s.shape
    exclude = exclude and [ids.tolist() for ids in exclude]
    losses = []
    for i, row in enumerate(s):
        p = row[i]
        others = [j for j in part_of(i, range(rows), exclude, columns) if j != i]
        loss = row.sum() * 0
        if others:
            loss = loss + torch.relu(row[others].mean() - p + margin)
        closest = [j for j in others if mining == "hard" or row[j] <= p]
        if closest:
            loss = loss + torch.relu(row[closest].max() - p + margin)
        losses.append(loss)
    return torch.stack(losses)


def cosent(scores, labels, scale):
    """Over a list of scores."""
    terms = [scores[:1] * 0]
    for score, label in zip(scores, labels, strict=True):
        terms.append(scale * (scores[labels < label] - score))
    return torch.logsumexp(torch.cat(terms), 0)
