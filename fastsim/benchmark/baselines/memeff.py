"""memeff: the CLIP loss and Qwen3-Embedding's InfoNCE, on a GPU without the N x N matrix.

By default it rescales the gradient (`stable`); here the gradient is that of the loss. The margin is
so wide that no negative counts as a false negative.
"""

from fastsim.benchmark.baselines.baseline import Baseline, gpu_or_interpreted, interpreted

NO_MARGIN = 3.0  # cosines differ by 2 at most


def package():
    """memeff; if Triton's interpreter runs its kernels, without its checks for a GPU."""
    if not interpreted():
        import memeff

        return memeff
    # memeff checks that there is a GPU, and reads its generation to choose the size of tiles.
    import torch

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    import memeff
    from memeff import clip_loss, clip_qwen3_loss, lit_loss, mrl_clip_loss

    for module in (clip_loss, clip_qwen3_loss, lit_loss, mrl_clip_loss):
        module._validate_features = lambda x, y: None
    return memeff


def symmetric_info_nce(problem):
    temperature = problem.options["temperature"]
    return package().MemoryEfficientCLIPLoss(temperature=temperature, stable=False)


def info_nce(problem):
    """memeff's InfoNCE; with the option `tau_plus` (the share of positives) the debiased loss."""
    options = {"margin": NO_MARGIN, "stable": False, **problem.options}
    return package().MemoryEfficientQwen3Loss(**options)


BASELINE = Baseline(
    "memeff",
    "memeff",
    {
        "info_nce": info_nce,
        "info_nce symmetric": symmetric_info_nce,
        "debiased_contrastive": info_nce,
    },
    gpu_or_interpreted,
)
