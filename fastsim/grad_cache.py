"""GradCache: a loss over a batch of any size, its encoder in micro-batches.

    1. encode every micro-batch without a graph, keeping the random state it began with
    2. one loss over all embeddings, and its gradient with respect to them
    3. encode every micro-batch again from the same random state, and push its gradient through

Embeddings (N, D) and their gradients are held, and the graph of one micro-batch; the gradients of
the encoder are those of the whole batch at once, to rounding, dropout included.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3.
"""

import contextlib

import torch
from torch.utils._pytree import tree_map

from fastsim.checks import FLOATING


class GradCache:
    """A training step in micro-batches.

    encode: micro-batch -> embeddings (n, D); a module, perhaps in DistributedDataParallel, or any
        function; or a list of them, one per column. It must draw random numbers, if any, from
        torch's default generators.
    loss: embeddings of each column (N, D) -> scalar; a module's parameters (a learnt temperature)
        get their gradient. With `group=` in it, all processes take one step together.
    micro_batch_size: rows that are encoded at once.

    Gradients of processes are synchronised once a step: where `encode` has `no_sync`, as
    DistributedDataParallel has, all micro-batches but the last run within it.
    """

    def __init__(self, encode, loss, *, micro_batch_size):
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int):
            raise TypeError(
                f"micro_batch_size: wanted an int, got {type(micro_batch_size).__name__}"
            )
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size: wanted at least 1, got {micro_batch_size}")
        self.encode, self.loss, self.micro_batch_size = encode, loss, micro_batch_size

    def backward(self, *columns, scale=None):
        """The loss of a batch, detached; its gradient is in the parameters' `grad` afterwards.

        columns: each a tensor (N, ...), a dictionary (or any nest) of such tensors, or a list of
            examples; or a `MicroBatches` that is cut already. A column may have rows of its own
            number (hard negatives).
        scale: function of the loss whose result is differentiated instead, such as
            `torch.amp.GradScaler.scale` or a division by the steps that are accumulated.
        """
        encoders = self.encode if isinstance(self.encode, (list, tuple)) else [self.encode]
        if len(encoders) not in (1, len(columns)):
            raise ValueError(f"columns: wanted {len(encoders)}, one per encoder, got {len(columns)}")
        if not columns:
            raise ValueError("columns: wanted at least one, got none")
        work = []  # (encode, micro-batch, column)
        for number, column in enumerate(columns):
            encode = encoders[number % len(encoders)]
            work += [(encode, part, number) for part in self._cut(column, number)]
        states, vectors = [], [[] for _ in columns]
        with torch.no_grad():
            for encode, part, number in work:
                states.append(_random_state())
                vectors[number].append(_checked(encode(part), number))
        # Weights that autocast has cast without a graph must not serve the second pass.
        torch.clear_autocast_cache()
        value, gradients, own = self._loss([torch.cat(parts) for parts in vectors], scale)
        gradients = [
            part
            for gradient, parts in zip(gradients, vectors, strict=True)
            for part in gradient.split([len(p) for p in parts])
        ]
        del vectors
        after = _random_state()
        for step, ((encode, part, _), state) in enumerate(zip(work, states, strict=True)):
            last = step == len(work) - 1
            with contextlib.nullcontext() if last else _no_sync(encode):
                _set_random_state(state)
                roots = [encode(part)]
                pulls = [gradients[step].to(roots[0].dtype)]
                if last:
                    roots += own[0]
                    pulls += own[1]
                torch.autograd.backward(roots, pulls)
            gradients[step] = None
        _set_random_state(after)
        return value

    def _loss(self, vectors, scale):
        """(loss, its gradients of the embeddings, (its parameters, their gradients))."""
        leaves = [v.requires_grad_() for v in vectors]
        own = []
        if isinstance(self.loss, torch.nn.Module):
            own = [p for p in self.loss.parameters() if p.requires_grad]
        with torch.enable_grad():
            value = self.loss(*leaves)
            scaled = value if scale is None else scale(value)
        found = torch.autograd.grad(scaled, [*leaves, *own], allow_unused=True)
        gradients = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, found, strict=False)
        ]
        used = [(p, g) for p, g in zip(own, found[len(leaves) :], strict=True) if g is not None]
        return value.detach(), gradients, tuple(map(list, zip(*used, strict=True))) or ([], [])

    def _cut(self, column, number):
        if isinstance(column, MicroBatches):
            return column
        return MicroBatches.of(column, self.micro_batch_size, f"columns[{number}]")


class MicroBatches(list):
    """A column that is cut already: what `encode` takes, one after the other."""

    @classmethod
    def of(cls, column, size, name="column"):
        """A tensor, a nest of tensors or a list of examples in parts of `size` rows."""
        if isinstance(column, (list, tuple)):
            count = len(column)
        else:
            counts = set()
            tree_map(lambda leaf: counts.add(len(leaf)) if torch.is_tensor(leaf) else None, column)
            if len(counts) != 1:
                raise ValueError(f"{name}: wanted tensors of one length, got {sorted(counts)}")
            (count,) = counts
        if count == 0:
            raise ValueError(f"{name}: wanted at least one row, got none")
        return cls(_rows(column, start, start + size) for start in range(0, count, size))


def _rows(column, start, stop):
    if isinstance(column, (list, tuple)):
        return column[start:stop]
    return tree_map(lambda leaf: leaf[start:stop] if torch.is_tensor(leaf) else leaf, column)


def _checked(vectors, number):
    if not isinstance(vectors, torch.Tensor) or vectors.dtype not in FLOATING:
        raise TypeError(
            f"encode: wanted floating-point embeddings (n, D) of columns[{number}],"
            f" got {type(vectors).__name__}"
        )
    return vectors


def _no_sync(encode):
    return encode.no_sync() if hasattr(encode, "no_sync") else contextlib.nullcontext()


def _random_state():
    """The states of the default generators of the CPU and of every GPU in use."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), gpus


def _set_random_state(state):
    cpu, gpus = state
    torch.set_rng_state(cpu)
    if gpus:
        torch.cuda.set_rng_state_all(gpus)
