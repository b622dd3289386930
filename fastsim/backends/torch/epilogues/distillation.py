"""Distillation: the softmax of the scores against that of a teacher's scores."""

from fastsim.backends.torch.epilogues.base import (
    Epilogue,
    exp_relative,
    exponentials,
    maxima,
    wide,
)


class Distillation(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, taught = block.panel, block.targets()
        tops = maxima(panel, 1), maxima(taught, 1)
        shares = exp_relative(taught, tops[1], tile.positive_scale)
        # Relative to the maxima, so that large scores lose no digits.
        along = [
            (shares * (side - top)).sum(1) for side, top in zip((panel, taught), tops, strict=True)
        ]
        total, *along = wide(shares.sum(1), *along)
        top, teacher_top = wide(*(top.squeeze(1) for top in tops))
        logits = tile.scale * along[0] + total * (tile.scale * top)
        taught_logits = tile.positive_scale * along[1] + total * (tile.positive_scale * teacher_top)
        sums = wide(*exponentials(panel, tile.scale, 1))
        return [*sums, teacher_top, total, logits, taught_logits]

    def score_grad(self, tile, block, coefficients):
        panel, taught = block.panel, block.targets()
        top, weight, teacher_top, teacher_weight = (c[:, None] for c in coefficients)
        exp_relative(panel, top, tile.scale, out=panel).mul_(weight)
        shares = exp_relative(taught, teacher_top, tile.positive_scale, out=taught)
        panel.sub_(shares.mul_(teacher_weight))
