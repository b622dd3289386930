"""What each kind of loss does with a panel of scores, in plain torch (csrc/epilogue.h).

`forward` leaves the panel as it is and returns the state of its rows and columns (fastsim/tile.py);
`score_grad` turns the scores into score gradients, in place. Both take a `Block`, whose left-out
scores are at LEFT_OUT, and hold one or two matrices of the panel's size beside it.
"""

import torch
from torch.nn.functional import softplus

from fastsim.backends.torch.block import LEFT_OUT, LOWEST
from fastsim.precision import wide_dtype

FEW = 8  # levels that are looked at one after another; more are scattered
SOFTPLUS_LINEAR = 50.0  # from here on softplus(x) is x, in double precision too


class Epilogue:
    """One kind of loss."""

    def prepare(self, tile, block):
        """Changes the scores before anything looks at them."""

    def forward(self, tile, block, sums=None):
        """The state of the panel: of its rows, then of its columns.

        sums: the first two parts over all columns, where they are known already.
        """
        raise NotImplementedError

    def score_grad(self, tile, block, coefficients):
        """The panel's scores become dL/dS; coefficients: those of its rows and columns."""
        raise NotImplementedError

    def fused(self, tile, block, weights):
        """(state, dL/dS in the panel) of a panel of whole rows, or of the whole matrix."""
        state = self.forward(tile, block)
        weights = 1.0 if weights is None else weights.to(state[0].dtype)
        self.score_grad(tile, block, narrowed(tile.coefficients(state, weights), block.panel))
        return state


def narrowed(coefficients, panel):
    """Coefficients in the panel's type."""
    return [c if c is None else c.to(panel.dtype) for c in coefficients]


def _given(number):
    """Whether it is not 0; of a tensor that is known."""
    return isinstance(number, torch.Tensor) or number != 0


def _wide(*parts):
    return [part.to(wide_dtype(part.device)) for part in parts]


def _shares(scores, top, scale, out=None):
    """exp(scale (s - top)) for a `top` that broadcasts."""
    return torch.sub(scores, top, out=out).mul_(scale).exp_()


def _extremes(scores, dim):
    return scores.amax(dim, keepdim=True).clamp_(min=LOWEST)


def _exponentials(scores, scale, dim, out=None):
    """(maxima, sums of exponentials relative to them) along a dimension."""
    top = _extremes(scores, dim)
    return top.squeeze(dim), _shares(scores, top, scale, out).sum(dim)


class Softmax(Epilogue):
    def prepare(self, tile, block):
        if _given(tile.margin):
            block.add_at_positives(block.panel.new_ones(block.panel.shape[0], 1) * -tile.margin)

    def forward(self, tile, block, sums=None):
        panel, scale = block.panel, tile.scale
        rows = _wide(*_exponentials(panel, scale, 1))
        columns = _wide(*_exponentials(panel, scale, 0)) if tile.symmetric else []
        return [*rows, *self._of_targets(tile, block, None), *columns]

    def fused(self, tile, block, weights):
        if not tile.rows_alone:
            return super().fused(tile, block, weights)
        panel = block.panel
        targets = None if block.one_positive or block.untargeted else block.targets()
        of_targets = self._of_targets(tile, block, targets)
        state = [*_wide(*_exponentials(panel, tile.scale, 1, out=panel)), *of_targets]
        weights = weights.to(state[0].dtype)
        _, of_row, of_target, *_ = narrowed(tile.coefficients(state, weights), panel)
        panel.mul_(of_row[:, None])
        self._take_targets(tile, block, of_target, targets)
        return state

    def _of_targets(self, tile, block, targets):
        """(sum_j t z, sum_j t) by rows."""
        rows = block.panel.shape[0]
        if block.untargeted:
            # Two tensors: an operator returns both, and no two of its results may share memory.
            wide = wide_dtype(block.panel.device)
            return [block.panel.new_zeros(rows, dtype=wide) for _ in range(2)]
        if block.one_positive:
            (scores,) = _wide(block.at_positives()[:, 0])
            count = torch.ones_like(scores)
            if not block.whole:
                count = torch.where(block.inside[:, 0], count, 0.0)
            return [tile.scale * scores, count]
        targets = block.targets() if targets is None else targets
        products, count = _wide((targets * block.panel).sum(1), targets.sum(1))
        return [tile.scale * products, count]

    def score_grad(self, tile, block, coefficients):
        panel, scale = block.panel, tile.scale
        top, of_row, of_target, column_top, of_column = coefficients
        of_columns = None
        if column_top is not None:
            of_columns = _shares(panel, column_top, scale).mul_(of_column)
        _shares(panel, top[:, None], scale, out=panel).mul_(of_row[:, None])
        if of_columns is not None:
            panel.add_(of_columns)
            del of_columns
        self._take_targets(tile, block, of_target, None)

    def _take_targets(self, tile, block, weights, targets):
        """Takes weights (R,) times the targets from the score gradients."""
        if block.untargeted:
            return
        if block.one_positive:
            block.add_at_positives(-weights[:, None])
            return
        targets = block.targets() if targets is None else targets
        block.panel.addcmul_(targets, weights[:, None], value=-1)


class Sigmoid(Epilogue):
    def forward(self, tile, block, sums=None):
        logits, wanted = self._logits(tile, block, out=None)
        losses = self._losses(block, logits, wanted)
        score_grads = self._score_grads(block, logits, wanted)
        return _wide(losses, score_grads.sum(1))

    def score_grad(self, tile, block, coefficients):
        logits, wanted = self._logits(tile, block, out=block.panel)
        self._score_grads(block, logits, wanted)
        block.panel.mul_((coefficients[0] * tile.scale)[:, None])

    def fused(self, tile, block, weights):
        logits, wanted = self._logits(tile, block, out=block.panel)
        losses = self._losses(block, logits, wanted)
        score_grads = self._score_grads(block, logits, wanted)
        state = _wide(losses, score_grads.sum(1))
        score_grads.mul_((weights.to(score_grads.dtype) * tile.scale)[:, None])
        return state

    @staticmethod
    def _logits(tile, block, out):
        logits = torch.mul(block.panel, tile.scale, out=out).add_(tile.bias)
        return logits, block.targets().add_(1).mul_(0.5)

    @staticmethod
    def _losses(block, logits, wanted):
        """sum_j max(z, 0) - wanted z + log(1 + e^-|z|) by rows, in which nothing cancels."""
        losses = softplus(logits.abs().neg_()).addcmul_(wanted, logits, value=-1)
        losses.add_(logits.clamp(min=0))
        return block_zero(block, _weighed(block, losses, wanted)).sum(1)

    @staticmethod
    def _score_grads(block, logits, wanted):
        score_grads = logits.sigmoid_().sub_(wanted)
        return block_zero(block, _weighed(block, score_grads, wanted))


def _weighed(block, matrix, wanted):
    """The matrix with positives (wanted 1, others 0) times the weights of their rows, in place."""
    if block.positive_weights is None:
        return matrix
    return matrix.mul_(torch.where(wanted > 0, block.positive_weights[:, None], 1.0))


def block_zero(block, matrix):
    """The matrix with 0 where pairs take no part."""
    block.fill(matrix, 0)
    return matrix


class SquaredError(Epilogue):
    def forward(self, tile, block, sums=None):
        return self._losses(self._differences(block, None))

    def score_grad(self, tile, block, coefficients):
        self._differences(block, block.panel).mul_(2 * coefficients[0][:, None])

    def fused(self, tile, block, weights):
        state = self._losses(self._differences(block, block.panel))
        block.panel.mul_(2 * weights.to(block.panel.dtype)[:, None])
        return state

    @staticmethod
    def _differences(block, out):
        return block_zero(block, torch.sub(block.panel, block.targets(), out=out))

    @staticmethod
    def _losses(differences):
        return _wide(differences.square().sum(1))


class Distillation(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, taught = block.panel, block.targets()
        tops = _extremes(panel, 1), _extremes(taught, 1)
        shares = _shares(taught, tops[1], tile.positive_scale)
        # Summed relative to the maxima, so that nothing is lost where they are large.
        along = [
            (shares * (side - top)).sum(1) for side, top in zip((panel, taught), tops, strict=True)
        ]
        total, *along = _wide(shares.sum(1), *along)
        own_top, top = _wide(*(top.squeeze(1) for top in tops))
        own_logits = tile.scale * along[0] + total * (tile.scale * own_top)
        logits = tile.positive_scale * along[1] + total * (tile.positive_scale * top)
        own = _wide(*_exponentials(panel, tile.scale, 1))
        return [*own, top, total, own_logits, logits]

    def score_grad(self, tile, block, coefficients):
        panel, taught = block.panel, block.targets()
        top, weight, teacher_top, teacher_weight = (c[:, None] for c in coefficients)
        _shares(panel, top, tile.scale, out=panel).mul_(weight)
        shares = _shares(taught, teacher_top, tile.positive_scale, out=taught)
        panel.sub_(shares.mul_(teacher_weight))


class MultiSimilarity(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        scores = panel.masked_fill(same, LEFT_OUT)
        negatives = _exponentials(scores, tile.scale, 1, out=scores)
        torch.neg(panel, out=scores).masked_fill_(~same, LEFT_OUT)
        return _wide(*negatives, *_exponentials(scores, tile.positive_scale, 1, out=scores))

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, weight, positive_top, positive_weight = (c[:, None] for c in coefficients)
        positives = _shares(panel.neg(), positive_top, tile.positive_scale).mul_(-positive_weight)
        _shares(panel, top, tile.scale, out=panel).mul_(weight)
        torch.where(block.same, positives, panel, out=panel)


class Decoupled(Epilogue):
    def forward(self, tile, block, sums=None):
        scores, (own,) = block.panel.clone(), _wide(block.at_positives()[:, 0])
        return [*self._of_negatives(tile, block, scores), tile.scale * own]

    def fused(self, tile, block, weights):
        panel, (own,) = block.panel, _wide(block.at_positives()[:, 0])
        state = [*self._of_negatives(tile, block, panel), tile.scale * own]
        coefficients = tile.coefficients(state, weights.to(state[0].dtype))
        _, of_row, of_positive = narrowed(coefficients, panel)
        panel.mul_(of_row[:, None])
        block.add_at_positives(-of_positive[:, None])
        return state

    @staticmethod
    def _of_negatives(tile, block, scores):
        """(maxima, sums); of the scores their exponentials remain, 0 at the positives."""
        block.set_at_positives(scores, LEFT_OUT)
        return _wide(*_exponentials(scores, tile.scale, 1, out=scores))

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, of_row, of_positive = coefficients
        block.set_at_positives(panel, LEFT_OUT)
        _shares(panel, top[:, None], tile.scale, out=panel).mul_(of_row[:, None])
        block.add_at_positives(-of_positive[:, None])


class Debiased(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        scores = panel.masked_fill(same, LEFT_OUT)
        of_weights = _exponentials(scores, tile.weight_scale, 1) if _given(tile.hardness) else ()
        negatives = _exponentials(scores, tile.hard_scale, 1, out=scores)
        torch.neg(panel, out=scores).masked_fill_(~same, LEFT_OUT)
        return _wide(*negatives, *_exponentials(scores, tile.scale, 1, out=scores), *of_weights)

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        found = (c if c is None else c[:, None] for c in coefficients)
        top, weight, positive_top, positive_weight, weight_top, of_weights = found
        positives = _shares(panel.neg(), positive_top, tile.scale).mul_(-positive_weight)
        if _given(tile.hardness):
            positives.masked_fill_(~block.same, 0)
            others = _shares(panel, weight_top, tile.weight_scale).mul_(of_weights)
            others = others.masked_fill_(block.same, 0)
            block.fill(others, 0)
            positives.sub_(others)
            del others
        _shares(panel, top, tile.hard_scale, out=panel).mul_(weight)
        if _given(tile.hardness):
            panel.masked_fill_(block.same, 0).add_(positives)
        else:
            torch.where(block.same, positives, panel, out=panel)


class Circle(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same, margin = block.panel, block.same, tile.margin
        rising = _raised(panel, margin).mul_(panel - margin).masked_fill_(same, LEFT_OUT)
        block.fill(rising, LEFT_OUT)
        negatives = _exponentials(rising, tile.scale, 1, out=rising)
        falling = _lowered(panel, margin).mul_(1 - margin - panel).masked_fill_(~same, LEFT_OUT)
        return _wide(*negatives, *_exponentials(falling, tile.scale, 1, out=falling))

    def score_grad(self, tile, block, coefficients):
        panel, margin = block.panel, tile.margin
        top, weight, positive_top, positive_weight = (c[:, None] for c in coefficients)
        lowered, raised = _lowered(panel, margin), _raised(panel, margin)
        falling = lowered * (1 - margin - panel)
        positives = _shares(falling, positive_top, tile.scale, out=falling)
        positives.mul_(lowered).mul_(-positive_weight)
        rising = panel.sub_(margin).mul_(raised)
        _shares(rising, top, tile.scale, out=rising).mul_(raised).mul_(weight)
        torch.where(block.same, positives, panel, out=panel)
        block.fill(panel, 0)


def _raised(scores, margin):
    """The weight of a negative."""
    return (scores + margin).relu_()


def _lowered(scores, margin):
    """The weight of a positive."""
    return (1 + margin - scores).relu_()


class MultiPositive(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, same = block.panel, block.same
        if sums is None:
            scores = panel.masked_fill(same, LEFT_OUT)
            sums = _wide(*_exponentials(scores, tile.scale, 1, out=scores))
        top, total = sums
        terms = self._terms(tile, panel, top, total.log())
        losses = softplus(terms, threshold=SOFTPLUS_LINEAR).masked_fill_(~same, 0).sum(1)
        score_grads = terms.sigmoid_().masked_fill_(~same, 0).sum(1)
        return [*sums, *_wide(losses, score_grads)]

    def score_grad(self, tile, block, coefficients):
        panel = block.panel
        top, weight, log_total, positive_weight = coefficients
        positives = self._terms(tile, panel, top, log_total).sigmoid_()
        positives.mul_(-positive_weight[:, None])
        _shares(panel, top[:, None], tile.scale, out=panel).mul_(weight[:, None])
        torch.where(block.same, positives, panel, out=panel)

    @staticmethod
    def _terms(tile, panel, top, log_total):
        """scale (top - s) + log_total."""
        top, log_total = (part.to(panel.dtype)[:, None] for part in (top, log_total))
        return torch.sub(top, panel).mul_(tile.scale).add_(log_total)


class Levels(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, levels = block.panel, tile.levels
        if block.dense is None:
            others = ~block.same
            block.fill(others, False)
            return self._one_by_one(tile, panel, (others, block.same))
        if len(levels) <= FEW:
            targets = block.dense.to(panel.dtype)
            masks = (block_zero(block, targets == level) for level in levels)
            return self._one_by_one(tile, panel, masks)
        return self._scattered(tile, block)

    @staticmethod
    def _one_by_one(tile, panel, masks):
        tops, totals = [], []
        for mask in masks:
            for side in (panel, panel.neg()):
                scores = side.masked_fill(~mask, LEFT_OUT)
                top = scores.amax().clamp_(min=LOWEST)
                tops.append(top)
                totals.append(*_wide(_shares(scores, top, tile.scale, out=scores).sum(1)))
        top = torch.stack(tops).view(-1, 2).t()
        total = torch.stack(totals).sum(1).view(-1, 2).t()
        return [*_wide(top), total]

    def _scattered(self, tile, block):
        count = len(tile.levels)
        index = self._index(tile, block).long()
        found = []
        for side in (block.panel, block.panel.neg()):
            block.fill(side, LEFT_OUT)
            scores = side.reshape(-1)
            top = scores.new_full((count,), LOWEST)
            top.scatter_reduce_(0, index, scores, "amax")
            shares = scores.sub(top[index]).mul_(tile.scale).exp_()
            (shares,) = _wide(shares)
            total = shares.new_zeros(count)
            if total.device.type == "cpu":
                total.index_add_(0, index, shares)
            else:  # the same sums added up in one order
                total.index_put_((index,), shares, accumulate=True)
            found.append((*_wide(top), total))
        return list(map(torch.stack, zip(*found, strict=True)))

    @staticmethod
    def _index(tile, block):
        """(R C,) the level of each pair."""
        if block.dense is None:
            return block.same.reshape(-1).to(torch.int32)
        targets = block.dense.to(block.panel.dtype).contiguous().reshape(-1)
        index = torch.searchsorted(tile.levels, targets, out_int32=True)
        return index.clamp_(max=len(tile.levels) - 1)

    def score_grad(self, tile, block, coefficients):
        panel, index = block.panel, self._index(tile, block)

        def of_pairs(values):
            return values.index_select(0, index).view(panel.shape)

        high, up, low, down = coefficients
        pull = _shares(panel.neg(), of_pairs(low), tile.scale).mul_(of_pairs(down))
        _shares(panel, of_pairs(high), tile.scale, out=panel).mul_(of_pairs(up)).sub_(pull)
        block.fill(panel, 0)


EPILOGUES = {
    "softmax": Softmax(),
    "sigmoid": Sigmoid(),
    "squared_error": SquaredError(),
    "distillation": Distillation(),
    "multi_similarity": MultiSimilarity(),
    "multi_positive": MultiPositive(),
    "circle": Circle(),
    "decoupled": Decoupled(),
    "debiased": Debiased(),
    "levels": Levels(),
}
