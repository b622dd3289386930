"""The losses once more, in float64 and row by row from their published formulas.

Nothing here imports fastsim: an oracle shares no code with what it checks. Each takes float64
tensors that may want gradients and returns the losses of the rows, or a scalar.
"""

import torch


def cosines(x, y):
    """One row of cosines at a time; a zero vector has cosine 0 with everything."""
    lengths = (y * y).sum(1)
    rows = []
    for a in x:
        square = (a * a).sum() * lengths
        dots = (a * y).sum(1)
        some = square > 0
        rows.append(torch.where(some, dots / torch.where(some, square, 1.0).sqrt(), dots * 0.0))
    return torch.stack(rows)


def scores(x, y, similarity):
    if similarity == "cosine":
        return cosines(x, y)
    return torch.stack([(a * y).sum(1) for a in x])


def log_sum_exp(terms):
    top = terms.detach().max()
    return top + (terms - top).exp().sum().log()


def info_nce(
    x,
    y,
    positives=None,
    *,
    temperature=0.05,
    symmetric=False,
    exclude=None,
    exclude_above=None,
    margin=0.0,
    candidate_bias=None,
    similarity="cosine",
    guide=None,
    guide_margin=0.0,
    guide_strategy="absolute",
    directions=("query_to_doc",),
    own_negatives=None,
    references=None,
    label_smoothing=0.0,
):
    s = scores(x, y, similarity)
    n, m = s.shape
    positives = list(range(n)) if positives is None else positives.tolist()
    of_rows, of_columns = (None, None) if exclude is None else exclude
    guides = None if guide is None else [side.double() for side in guide]
    # By the guide, of rows of either side with rows of either: [side][side][row][row].
    guide_cosines = guides and [[cosines(a, b).tolist() for b in guides] for a in guides]
    bias = torch.zeros(m, dtype=torch.float64) if candidate_bias is None else candidate_bias

    def limit(i):
        t = guide_cosines[0][1][i][positives[i]]
        return t - guide_margin * (abs(t) if guide_strategy == "relative" else 1)

    def out(i, side, row, other, column):
        """Whether row i leaves a pair out that is no positive: side 0 an anchor, 1 a candidate."""
        ids = of_rows, of_columns
        if exclude is not None and ids[side][row] == ids[other][column]:
            return True
        if guide is None:
            return False
        return guide_cosines[side][other][row][column] > limit(i)

    lowered = torch.zeros(n, m, dtype=torch.float64)
    part = torch.ones(n, m, dtype=torch.bool)
    plain = s.tolist()
    for i, p in enumerate(positives):
        lowered[i, p] = margin
        for j in range(m):
            if j != p and out(i, 0, i, 1, j):
                part[i, j] = False
            if exclude_above is not None and plain[i][j] > plain[i][p] + exclude_above:
                part[i, j] = False
    z = torch.stack([row + bias for row in (s - lowered) / temperature])
    losses = []
    for i, p in enumerate(positives):
        terms = [z[i][part[i]]]

        def add(one, others, wanted, bias=0.0, terms=terms):
            logits = scores(one[None], others, similarity)[0] / temperature + bias
            terms.append(logits[wanted])

        if "query_to_query" in directions:
            add(x[i], x, [j for j in range(n) if j != i and not out(i, 0, i, 0, j)])
        if "doc_to_query" in directions:
            add(y[p], x, [j for j in range(n) if j == i or not out(i, 1, p, 0, j)])
        if "doc_to_doc" in directions:
            add(y[p], y, [j for j in range(m) if j != p and not out(i, 1, p, 1, j)], bias)
        if own_negatives is not None:
            kept = range(own_negatives.shape[1])
            if exclude_above is not None:
                own = scores(x[i][None], own_negatives[i].double(), similarity)[0]
                kept = [k for k in kept if own[k] <= s[i, p] + exclude_above]
            add(x[i], own_negatives[i].double(), list(kept))
        if references is not None:
            add(x[i], references.detach().double(), list(range(len(references))))
        loss = log_sum_exp(torch.cat(terms)) - z[i, p]
        if symmetric:
            loss = (loss + log_sum_exp(z[:, p][part[:, p]]) - z[i, p]) / 2
        if label_smoothing:
            target = torch.full((m,), label_smoothing / m, dtype=torch.float64)
            target[p] += 1 - label_smoothing
            loss = (target * (log_sum_exp(z[i]) - z[i])).sum()
        losses.append(loss)
    return torch.stack(losses)


def unit(x):
    """x / |x| of a vector; a zero vector stays."""
    norm = x.square().sum().sqrt() if (x != 0).any() else x.sum() + 1
    return x / norm


def max_sim(
    queries, documents, query_mask=None, document_mask=None, *, similarity="cosine", average=False
):
    """Scores of the queries, lists of token vectors or tensors, with the documents."""
    kept = []
    for texts, mask in ((queries, query_mask), (documents, document_mask)):
        some = [
            [t for k, t in enumerate(text) if mask is None or mask[i, k]]
            for i, text in enumerate(texts)
        ]
        kept.append([[unit(t) for t in text] if similarity == "cosine" else text for text in some])
    rows = []
    for query in kept[0]:
        row = []
        for document in kept[1]:
            if not query or not document:
                value = torch.tensor(-torch.inf if query else 0.0, dtype=torch.float64)
                row.append(value)
                continue
            products = torch.stack(query) @ torch.stack(document).T
            total = sum(products[k, products[k].argmax()] for k in range(len(query)))
            row.append(total / len(query) if average else total)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def late_interaction(
    queries,
    documents,
    query_mask=None,
    document_mask=None,
    positives=None,
    *,
    temperature=1.0,
    symmetric=False,
    exclude=None,
    **options,
):
    z = max_sim(queries, documents, query_mask, document_mask, **options) / temperature
    n, m = z.shape
    positives = list(range(n)) if positives is None else positives.tolist()
    part = torch.ones(n, m, dtype=torch.bool)
    for i, p in enumerate(positives):
        for j in range(m):
            if exclude is not None and j != p and exclude[0][i] == exclude[1][j]:
                part[i, j] = False
    losses = []
    for i, p in enumerate(positives):
        loss = log_sum_exp(z[i][part[i]]) - z[i, p]
        if symmetric:
            loss = (loss + log_sum_exp(z[:, p][part[:, p]]) - z[i, p]) / 2
        losses.append(loss)
    return torch.stack(losses)


def late_interaction_distillation(
    queries,
    documents,
    teacher_scores,
    query_mask=None,
    document_mask=None,
    *,
    temperature=1.0,
    teacher_temperature=None,
    **options,
):
    """documents: (C, Ld, D) of all queries, or (B, N, Ld, D), those of each."""
    taught = teacher_temperature or temperature
    losses = []
    for i, query in enumerate(queries):
        own = documents, document_mask
        if documents.dim() == 4:
            own = documents[i], None if document_mask is None else document_mask[i]
        masks = None if query_mask is None else query_mask[i : i + 1], own[1]
        z = max_sim([query], own[0], *masks, **options)[0] / temperature
        w = teacher_scores[i].double() / taught
        log_q, log_p = z - log_sum_exp(z), w - log_sum_exp(w)
        losses.append(temperature**2 * (log_p.exp() * (log_p - log_q)).sum())
    return torch.stack(losses)


def decoupled_contrastive(
    x, y, positives=None, *, temperature=0.1, candidate_bias=None, similarity="cosine"
):
    z = scores(x, y, similarity) / temperature
    if candidate_bias is not None:
        z = torch.stack([row + candidate_bias for row in z])
    losses = []
    for i in range(len(z)):
        p = i if positives is None else int(positives[i])
        negatives = [j for j in range(len(y)) if j != p]
        losses.append(log_sum_exp(z[i][negatives]) - z[i, p] if negatives else z[i, p] * 0.0)
    return torch.stack(losses)


def debiased_contrastive(
    x, y, positives=None, *, temperature=0.5, tau_plus=0.1, beta=0.0, exclude=None
):
    z = cosines(x, y) / temperature
    losses = []
    for i in range(len(z)):
        p = i if positives is None else int(positives[i])
        negatives = [
            j
            for j in range(len(y))
            if j != p and (exclude is None or exclude[0][i] != exclude[1][j])
        ]
        if not negatives:
            losses.append(z[i, p] * 0.0)
            continue
        prior = float(tau_plus[i]) if isinstance(tau_plus, torch.Tensor) else tau_plus
        count, negative = len(negatives), z[i][negatives]
        # All relative to the positive: exp(z - z_p).
        top = (negative - z[i, p]).detach().max()
        weights = (beta * (negative - negative.detach().max())).exp()
        rate = count * ((negative - z[i, p] - top).exp() * weights).sum() / weights.sum()
        rate = (rate - prior * count * (-top).exp()) / (1 - prior)
        least = count * (-1 / temperature - z[i, p] - top).exp()
        rate = torch.maximum(rate, least)
        losses.append(top + ((-top).exp() + rate).log())
    return torch.stack(losses)


def compared(x, groups, references, reference_groups, own_first):
    """(what the rows are compared with, for each of them its mates and the others there)."""
    alone = references is None
    y, of_y = (x, groups) if alone else (references, reference_groups)
    labels, of_y, found = groups.tolist(), of_y.tolist(), []
    for i, label in enumerate(labels):
        part = [j for j in range(len(y)) if j != i or not (alone or own_first)]
        mates = [j for j in part if of_y[j] == label]
        found.append((mates, [j for j in part if of_y[j] != label]))
    return y, found


def sup_con(
    x,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.1,
    similarity="cosine",
):
    y, parts = compared(x, groups, references, reference_groups, own_first)
    z = scores(x, y, similarity) / temperature
    losses = []
    for row, (mates, others) in zip(z, parts, strict=True):
        terms = [log_sum_exp(row[mates + others]) - row[p] for p in mates]
        losses.append(sum(terms, row.sum() * 0.0) / max(len(mates), 1))
    return torch.stack(losses)


def matrix(targets, n, m):
    """The target matrix from any of its three forms."""
    if targets is None:
        targets = (torch.arange(n), torch.arange(m))
    if isinstance(targets, tuple):
        rows, columns = targets
        return torch.tensor([[1.0 if a == b else -1.0 for b in columns] for a in rows]).double()
    return targets.double()


def siglip(
    x, y, targets=None, *, scale=10.0, bias=-10.0, positive_weight="one", similarity="cosine"
):
    z = scale * scores(x, y, similarity) + bias
    wanted = (matrix(targets, *z.shape) + 1) / 2
    log_yes = -torch.log1p(torch.exp(-z.abs())) + z.clamp(max=0)
    log_no = -torch.log1p(torch.exp(-z.abs())) - z.clamp(min=0)
    counts = torch.ones_like(wanted)
    for i, row in enumerate(wanted.tolist()):
        for j, positive in enumerate(row):
            of_row, of_column = wanted[i].sum().item(), wanted[:, j].sum().item()
            if positive and positive_weight == "row":
                counts[i, j] = 1 / of_row
            if positive and positive_weight == "both":
                counts[i, j] = 0.5 / of_row + 0.5 / of_column
    return -(counts * (wanted * log_yes + (1 - wanted) * log_no)).sum(1)


def matrix_cross_entropy(
    x, y, targets, *, temperature=1.0, candidate_bias=None, similarity="cosine"
):
    z = scores(x, y, similarity) / temperature
    if candidate_bias is not None:
        z = torch.stack([row + candidate_bias for row in z])
    wanted = matrix(targets, *z.shape)
    return torch.stack(
        [(t * (log_sum_exp(row) - row)).sum() for row, t in zip(z, wanted, strict=True)]
    )


def matrix_mse(x, y, targets):
    s = cosines(x, y)
    return ((s - matrix(targets, *s.shape)) ** 2).sum(1) / len(y)


def distill(
    x,
    y,
    teacher_x,
    teacher_y=None,
    positives=None,
    *,
    kind="kl",
    temperature=None,
    teacher_temperature=None,
):
    s = cosines(x, y)
    t = teacher_x.double() if teacher_y is None else cosines(teacher_x.double(), teacher_y.double())
    own = temperature or {"kl": 0.05, "margin_mse": 1.0}[kind]
    taught = teacher_temperature or own
    losses = []
    for i in range(len(x)):
        z, w = s[i] / own, t[i] / taught
        if kind == "kl":
            log_q, log_p = z - log_sum_exp(z), w - log_sum_exp(w)
            losses.append(own**2 * (log_p.exp() * (log_p - log_q)).sum())
            continue
        p = i if positives is None else int(positives[i])
        others = [j for j in range(len(y)) if j != p]
        terms = [((z[p] - z[j]) - (w[p] - w[j])) ** 2 for j in others]
        losses.append(sum(terms, z.sum() * 0.0) / max(len(others), 1))
    return torch.stack(losses)


def full_triplet(x, y, *, margin=0.25, mining="semi-hard", exclude=None):
    s = cosines(x, y)
    losses = []
    for i in range(len(x)):
        p = s[i, i]
        negatives = [
            j
            for j in range(len(y))
            if j != i and (exclude is None or exclude[0][i] != exclude[1][j])
        ]
        near = [j for j in negatives if mining == "hard" or s[i, j] <= p]
        loss = p * 0.0
        if negatives:
            loss = loss + torch.relu(s[i][negatives].mean() - p + margin)
        if near:
            loss = loss + torch.relu(s[i][near].max() - p + margin)
        losses.append(loss)
    return torch.stack(losses)


def nt_xent(
    x,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    temperature=0.07,
    similarity="cosine",
):
    y, parts = compared(x, groups, references, reference_groups, own_first)
    z = scores(x, y, similarity) / temperature
    losses = []
    for row, (mates, others) in zip(z, parts, strict=True):
        terms = [log_sum_exp(row[[p, *others]]) - row[p] for p in mates]
        losses.append(sum(terms, row.sum() * 0.0))
    return torch.stack(losses)


def multi_similarity(
    x,
    groups,
    references=None,
    reference_groups=None,
    *,
    own_first=False,
    alpha=2.0,
    beta=50.0,
    base=0.5,
    similarity="cosine",
):
    y, parts = compared(x, groups, references, reference_groups, own_first)
    losses = []
    for row, (mates, others) in zip(scores(x, y, similarity), parts, strict=True):
        zero = row[:1] * 0.0
        pull = log_sum_exp(torch.cat([zero, -alpha * (row[mates] - base)])) / alpha
        push = log_sum_exp(torch.cat([zero, beta * (row[others] - base)])) / beta
        losses.append(pull + push)
    return torch.stack(losses)


def circle(
    x, groups, references=None, reference_groups=None, *, own_first=False, gamma=80.0, margin=0.4
):
    y, parts = compared(x, groups, references, reference_groups, own_first)
    losses = []
    for row, (mates, others) in zip(cosines(x, y), parts, strict=True):
        if not (mates and others):
            losses.append(row.sum() * 0.0)
            continue
        near, far = row[others], row[mates]
        # The weights are numbers, not functions of the scores.
        pull = gamma * (1 + margin - far.detach()).clamp(min=0) * (1 - margin - far)
        push = gamma * (near.detach() + margin).clamp(min=0) * (near - margin)
        total = log_sum_exp(pull) + log_sum_exp(push)
        losses.append(log_sum_exp(torch.stack([total * 0, total])))
    return torch.stack(losses)


def distances(x, distance):
    if distance == "cosine":
        return 1 - cosines(x, x)
    square = ((x[:, None] - x[None]) ** 2).sum(2)
    some = square > 0  # the square root has no gradient at 0
    return torch.where(some, torch.where(some, square, 1.0).sqrt(), square * 0.0)


def batch_hard_triplet(x, groups, *, margin=1.0, distance="euclidean", soft=False):
    d = distances(x, distance)
    losses = []
    for i in range(len(x)):
        mates = [j for j in range(len(x)) if j != i and groups[j] == groups[i]]
        others = [j for j in range(len(x)) if groups[j] != groups[i]]
        if mates and others:
            gap = d[i][mates].max() - d[i][others].min() + margin
            losses.append(log_sum_exp(torch.stack([gap * 0, gap])) if soft else torch.relu(gap))
        else:
            losses.append(d[i, i] * 0.0)
    return torch.stack(losses)


def positive_pairs(groups):
    n = len(groups)
    return [(i, p) for i in range(n) for p in range(n) if p != i and groups[p] == groups[i]]


def batch_semi_hard_triplet(x, groups, *, margin=5.0, distance="euclidean"):
    d = distances(x, distance)
    terms = []
    for i, p in positive_pairs(groups):
        others = [j for j in range(len(x)) if groups[j] != groups[i]]
        farther = [j for j in others if d[i, j] > d[i, p]]
        if others:
            negative = d[i][farther].min() if farther else d[i][others].max()
            terms.append(torch.relu(d[i, p] - negative + margin))
        else:
            terms.append(d[i, p] * 0.0)
    return sum(terms, d.sum() * 0.0) / max(len(terms), 1)


def batch_all_triplet(x, groups, *, margin=5.0, distance="euclidean"):
    d = distances(x, distance)
    total, count = d.sum() * 0.0, 0
    for i, p in positive_pairs(groups):
        others = [j for j in range(len(x)) if groups[j] != groups[i]]
        terms = d[i, p] - d[i][others] + margin
        total, count = total + terms[terms > 0].sum(), count + int((terms > 0).sum())
    return total / max(count, 1)


def cosent(scores, labels, *, scale=20.0):
    terms = [torch.zeros(1, dtype=torch.float64)]
    for score, label in zip(scores, labels, strict=True):
        terms.append(scale * (scores[labels < label] - score))
    return log_sum_exp(torch.cat(terms))


def cosent_matrix(x, y, targets, *, scale=20.0, similarity="cosine"):
    s = scores(x, x if y is None else y, similarity)
    wanted = matrix(targets, *s.shape)
    n, m = s.shape
    entries = [(i, j) for i in range(n) for j in range(m) if y is not None or j > i]
    if not entries:
        return s.sum() * 0.0
    rows, columns = map(list, zip(*entries, strict=True))
    return cosent(s[rows, columns], wanted[rows, columns], scale=scale)


def angle(u, v, labels, *, scale=20.0):
    scores = []
    for a, b in zip(u, v, strict=True):
        half = len(a) // 2
        first = torch.complex(a[:half], a[half:])
        second = torch.complex(b[:half], b[half:])
        # Re and Im of first / second with both moduli taken out, summed over the dimensions.
        product = (first * second.conj()).sum()
        scores.append(((product.real + product.imag) / (a.norm() * b.norm())).abs())
    return cosent(torch.stack(scores), labels, scale=scale)


def triplet_margin(a, p, n, *, margin=1.0):
    rows = []
    for x, y, z in zip(a, p, n, strict=True):
        near, far = ((x - y) ** 2).sum().sqrt(), ((x - z) ** 2).sum().sqrt()
        rows.append(torch.relu(near - far + margin))
    return torch.stack(rows)


def cosine_regression(u, v, labels):
    s = torch.stack([cosines(a[None], b[None])[0, 0] for a, b in zip(u, v, strict=True)])
    return (s - labels) ** 2
