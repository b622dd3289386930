"""Losses over all scores of a batch that sentence-transformers lacks."""

import torch
from sentence_transformers.base.losses.merged_forward import embed_columns

from fastsim.autocast import joined
from fastsim.integrations.sentence_transformers.fused import as_numbers, check_columns, class_labels
from fastsim.losses import cosent_matrix, full_triplet, siglip


class _Columns(torch.nn.Module):
    """A loss of the columns of a batch; `options` names its parameters."""

    options = ()

    def __init__(self, model, **values):
        super().__init__()
        self.model = model
        for name in self.options:
            setattr(self, name, values[name])

    def forward(self, sentence_features, labels):
        """The loss of tokenized columns."""
        embeddings = embed_columns(self.model, sentence_features)
        return self.compute_loss_from_embeddings(embeddings, labels)

    def get_config_dict(self):
        """The options, with the value of a learnt number."""
        return as_numbers({name: getattr(self, name) for name in self.options})


class FullTripletLoss(_Columns):
    """Mean and closest negative, both with a margin (fastsim.full_triplet).

    Inputs: (anchor, positive[, negative, ...]), no labels: every positive of another row and every
    negative is a negative. margin: 0.25 by default. mining: "semi-hard" or "hard".
    """

    options = ("margin", "mining")

    def __init__(self, model, margin=0.25, mining="semi-hard"):
        super().__init__(model, margin=margin, mining=mining)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of the columns [anchors, positives, *negatives], each (N, D) -> scalar."""
        check_columns(embeddings)
        anchors, *others = embeddings
        return full_triplet(anchors, joined(others), margin=self.margin, mining=self.mining)

    @property
    def citation(self):
        return """
@inproceedings{schroff2015facenet,
    title={FaceNet: A Unified Embedding for Face Recognition and Clustering},
    author={Florian Schroff and Dmitry Kalenichenko and James Philbin},
    booktitle={CVPR},
    year={2015}
}
"""


class SigLIPLoss(_Columns):
    """A binary decision for every pair of rows (fastsim.siglip).

    Inputs: (anchor, positive[, negative, ...]) without labels, where an anchor matches only its
    positive; or one or two columns with class labels, where rows of one class match. scale, bias:
    numbers, or Parameters that are learnt.
    """

    options = ("scale", "bias")

    def __init__(self, model, scale=10.0, bias=-10.0):
        super().__init__(model, scale=scale, bias=bias)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of columns, each (N, D), with N class labels or None -> scalar."""
        x, y, targets = _matrix(self, embeddings, labels)
        return siglip(x, x if y is None else y, targets, scale=self.scale, bias=self.bias)

    @property
    def citation(self):
        return """
@inproceedings{zhai2023sigmoid,
    title={Sigmoid Loss for Language Image Pre-Training},
    author={Xiaohua Zhai and Basil Mustafa and Alexander Kolesnikov and Lucas Beyer},
    booktitle={ICCV},
    year={2023}
}
"""


class CoSENTMatrixLoss(_Columns):
    """CoSENT over every pair of entries of the batch's score matrix (fastsim.cosent_matrix).

    Inputs as for `SigLIPLoss`; with one column each pair of rows counts once. scale: a number, or a
    Parameter that is learnt.
    """

    options = ("scale",)

    def __init__(self, model, scale=20.0):
        super().__init__(model, scale=scale)

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        """The loss of columns, each (N, D), with N class labels or None -> scalar."""
        x, y, targets = _matrix(self, embeddings, labels)
        return cosent_matrix(x, y, targets, scale=self.scale)

    @property
    def citation(self):
        return """
@article{10531646,
    author={Huang, Xiang and Peng, Hao and Zou, Dongcheng and Liu, Zhiwei and Li, Jianxin and
        Liu, Kay and Wu, Jia and Su, Jianlin and Yu, Philip S.},
    journal={IEEE/ACM Transactions on Audio, Speech, and Language Processing},
    title={CoSENT: Consistent Sentence Embedding via Similarity Ranking},
    year={2024},
    doi={10.1109/TASLP.2024.3402087}
}
"""


def _matrix(loss, embeddings, labels):
    """(x, y or None for x with itself, targets) of the columns of a batch."""
    if labels is None:
        check_columns(embeddings)
        return embeddings[0], joined(embeddings[1:]), None
    check_columns(embeddings, least=1, most=2)
    groups = class_labels(loss, labels, len(embeddings[0]))
    return embeddings[0], embeddings[1] if len(embeddings) == 2 else None, (groups, groups)
