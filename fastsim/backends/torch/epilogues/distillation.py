"""A teacher's softmax against ours."""

from fastsim.backends.torch.epilogues.base import (
    Epilogue,
    exp_relative,
    exponentials,
    extremes,
    wide,
)


class Distillation(Epilogue):
    def forward(self, tile, block, sums=None):
        panel, taught = block.panel, block.targets()
        tops = extremes(panel, 1), extremes(taught, 1)
        shares = exp_relative(taught, tops[1], tile.positive_scale)
        # Summed relative to the maxima, so that nothing is lost where they are large.
        along = [
            (shares * (side - top)).sum(1) for side, top in zip((panel, taught), tops, strict=True)
        ]
        total, *along = wide(shares.sum(1), *along)
        own_top, top = wide(*(top.squeeze(1) for top in tops))
        own_logits = tile.scale * along[0] + total * (tile.scale * own_top)
        logits = tile.positive_scale * along[1] + total * (tile.positive_scale * top)
        own = wide(*exponentials(panel, tile.scale, 1))
        return [*own, top, total, own_logits, logits]

    def score_grad(self, tile, block, coefficients):
        panel, taught = block.panel, block.targets()
        top, weight, teacher_top, teacher_weight = (c[:, None] for c in coefficients)
        exp_relative(panel, top, tile.scale, out=panel).mul_(weight)
        shares = exp_relative(taught, teacher_top, tile.positive_scale, out=taught)
        panel.sub_(shares.mul_(teacher_weight))
