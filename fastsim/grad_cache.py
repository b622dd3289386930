"""GradCache: a loss over a batch of any size, with the encoder running in micro-batches.

    1. encode every micro-batch without a graph, and keep the random state at its start
    2. compute one loss over all embeddings, and its gradient with respect to them
    3. encode every micro-batch again from its random state, and backpropagate its gradient

Memory holds the embeddings (N, D), their gradients and the graph of one micro-batch. The gradients
of the encoder equal those of the whole batch to rounding, dropout included, unless the encoder
mixes rows: BatchNorm in training mode normalises by a micro-batch, and updates its running
statistics twice a step.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
section 3.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from fastsim.agreement import Failures, raised_together
from fastsim.checks import FLOATING, int_of
from fastsim.dtensor import any_dtensor
from fastsim.gradient_sync import (
    accumulating,
    device_of,
    leaves_of,
    parted,
    process_group_of,
    pull_early,
    reaching_all,
    reducing,
    reshard_after_error,
    run_backward,
    send_buffers,
    shards_parameters,
    unshard,
    wrappers_of,
)

__all__ = ["GradCache", "MicroBatches"]


class GradCache:
    """A training step in micro-batches.

    Method and source: fastsim/grad_cache.py.

    encode: micro-batch -> embeddings (n, D). A module, which may be wrapped, or any function; or a
        list of these, one for each column. An `Encoder` or a SentenceTransformer takes lists of
        texts. Random draws from torch's default generators (dropout) are the same in both passes;
        a device whose generators cannot be set back is refused.
    loss: embeddings of each column (N, D) -> scalar. Parameters of the loss (a temperature, a head)
        get their gradients too. If it has a `group=`, all processes take one step together.
    micro_batch_size: the number of rows that are encoded at once.
    module: the encoder's module, if `encode` is a function that hides it. A module in the closure
        of the function is found without it.

    If the encoder is wrapped in DistributedDataParallel, FSDP2 (`fully_shard`) or a DeepSpeed
    engine, processes reduce their gradients once per step, after the last micro-batch. All of them
    encode equally many micro-batches: a process with fewer encodes its first one again and does not
    use the result. An error in the encoder of one process is raised on all processes; the gradients
    are then invalid.
    FSDP2 gathers its parameters before each micro-batch, unless `set_reshard_after_forward(False)`
    keeps them. ZeRO-2 and 3 reduce once if DeepSpeed has `coalesce_grad_reduction` and does not
    accumulate over steps, otherwise after each micro-batch.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Example:
        >>> from fastsim.grad_cache import GradCache
        >>> encoder, rows = torch.nn.Linear(4, 2, bias=False), torch.randn(10, 4)
        >>> step = GradCache(encoder, fastsim.losses.InfoNCE(), micro_batch_size=3)
        >>> loss = step.backward(rows, rows)
        >>> encoder.weight.grad.shape
        torch.Size([2, 4])
    """

    def __init__(self, encode, loss, *, micro_batch_size, module=None):
        self.micro_batch_size = int_of("micro_batch_size", micro_batch_size, 1)
        several = isinstance(encode, (list, tuple))
        if several and not encode:
            raise ValueError("encode: wanted at least one function, got an empty list")
        for one in encode if several else [encode]:
            _check_function("encode", one)
        _check_function("loss", loss)
        if module is not None and not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: wanted a torch.nn.Module, got {type(module).__name__}")
        self.encode = [_of_texts(one) for one in encode] if several else _of_texts(encode)
        self.loss, self.module = loss, module

    def backward(self, *columns, scale=None):
        """Returns the loss of a batch, detached, and adds its gradient to the parameters' `grad`.

        columns: each a tensor (N, ...), a mapping of such tensors, which may be nested, or a list
            of examples; this method cuts them into micro-batches, unless they are `MicroBatches`.
            Columns may differ in their number of rows.
        scale: a function of the loss; its result is differentiated instead of the loss. For example
            `torch.amp.GradScaler.scale`, or a division by the number of accumulated steps.

        Raises:
            TypeError, ValueError: for columns, embeddings or a loss that do not fit.
            RuntimeError: if another process of the same step has failed.
        """
        encoders = self.encode if isinstance(self.encode, (list, tuple)) else [self.encode]
        if not columns or len(encoders) not in (1, len(columns)):
            wanted = "at least one" if len(encoders) == 1 else f"{len(encoders)}, one per encoder"
            raise ValueError(f"columns: wanted {wanted}, got {len(columns)}")
        if scale is not None:
            _check_function("scale", scale)
        wrappers = {id(encode): wrappers_of(encode, self.module) for encode in encoders}
        together = [wrapper for several in wrappers.values() for wrapper in several]
        group, device = process_group_of(together), device_of(together)
        parts = []
        with raised_together(group):
            for number, column in enumerate(columns):
                name = f"columns[{number}]"
                if not isinstance(column, MicroBatches):
                    column = MicroBatches.of(column, self.micro_batch_size, name, group is not None)
                if not column:
                    raise ValueError(f"{name}: wanted at least one micro-batch, got none")
                parts.append(column)
        work = _work(encoders, parts, _most(parts, group, device))
        try:
            send_buffers(together)
            vectors, states = self._encode(work, len(columns), wrappers, group)
            unshard(together)  # the loss may share parameters with the encoder
            with raised_together(group):
                value, gradients, own = self._differentiate(vectors, scale)
            del vectors
            after = _random_state()
            with accumulating(together) as ends:
                ends = dict(zip(map(id, together), ends, strict=True))
                own = pull_early(together, own)
                self._pull(work, states, gradients, own, wrappers, ends, group)
        except BaseException:
            reshard_after_error(together)
            raise
        _set_random_state(after)
        return value

    def _encode(self, work, count, wrappers, group):
        """The embeddings of each column, and the random states before each micro-batch."""
        vectors, states = [[] for _ in range(count)], []
        failures = Failures(group)
        with torch.no_grad():
            for encode, part, number, used in work:
                sharded = shards_parameters(wrappers[id(encode)])
                unshard(wrappers[id(encode)])
                states.append(_random_state())
                with failures.caught():
                    if failures.error is None:
                        encoded = _encoded(encode, part, number)
                        vectors[number].append(encoded if used else encoded[:0])
                if sharded:  # the next gathering would wait for a process that has failed
                    failures.tell()
            with failures.caught():
                if failures.error is None:
                    vectors = [_joined(parts, number) for number, parts in enumerate(vectors)]
        failures.tell()
        # Weights that autocast has cast here have no graph: the second pass must cast its own.
        torch.clear_autocast_cache()
        return vectors, states

    def _pull(self, work, states, gradients, own, wrappers, ends, group):
        """The second pass: encodes every micro-batch again and backpropagates its gradients.

        gradients: those of each column's embeddings, (N, D).
        own: [(parameter of the loss, its gradient)].
        ends: {id of a wrapper: whether it reduces after its last micro-batch}.
        """
        failures, learns = Failures(group), False
        last = {id(w): step for step, (encode, *_) in enumerate(work) for w in wrappers[id(encode)]}
        for step, (encode, part, number, used) in enumerate(work):
            running = wrappers[id(encode)]
            now = [step == last[id(wrapper)] and ends[id(wrapper)] for wrapper in running]
            with reducing(running, now):
                unshard(running)
                _set_random_state(states[step])
                with failures.caught():
                    if failures.error is None:
                        encoded = encode(part)
                # Ranks wait for each other in a backward pass that reduces or gathers.
                if any(now) or shards_parameters(running):
                    failures.tell()
                if failures.error is not None:
                    continue
                if used:
                    pull, gradients[number] = gradients[number].tensor_split([len(encoded)])
                else:
                    pull = torch.zeros_like(encoded)
                # Of several encoders some may be frozen: their embeddings have no graph.
                roots, pulls = ([encoded], [pull]) if encoded.requires_grad else ([], [])
                ending = [w for w, ends_now in zip(running, now, strict=True) if ends_now]
                learnt, own = parted(own, ending, everything=step == len(work) - 1)
                roots, pulls = roots + [p for p, _ in learnt], pulls + [g for _, g in learnt]
                learns = learns or bool(roots)
                with failures.caught(), reaching_all(ending):
                    if roots:
                        run_backward(running, roots, pulls)
        with failures.caught():
            if failures.error is None and not learns:
                raise ValueError(
                    "encode: wanted embeddings with a gradient, got none in any column"
                )
        failures.tell()

    def _differentiate(self, vectors, scale):
        """(loss, its gradients for each column, [(parameter of the loss, its gradient)])."""
        leaves = [vector.requires_grad_() for vector in vectors]
        own = []
        if isinstance(self.loss, torch.nn.Module):
            own = [p for p in self.loss.parameters() if p.requires_grad]
            _check_whole(own)
        with torch.enable_grad():
            value = self.loss(*leaves)
            scaled = value if scale is None else scale(value)
        for name, number in (("loss", value), ("scale", scaled)):
            _check_differentiable(name, number)
        known = {id(tensor) for tensor in (*leaves, *own)}
        # A loss that is a function may use a learnt temperature or a layer.
        further = [leaf for leaf in leaves_of(scaled) if id(leaf) not in known]
        _check_whole(further)
        own += further
        grads = torch.autograd.grad(scaled, [*leaves, *own], materialize_grads=True)
        count = len(leaves)
        return value.detach(), list(grads[:count]), list(zip(own, grads[count:], strict=True))


def _check_whole(own):
    """Refuses parameters of a loss of which this process holds only a part."""
    if any_dtensor(own):
        raise ValueError(
            "loss: wanted parameters of its own that are whole on every rank, got DTensors;"
            " leave the loss out of fully_shard: what it learns is averaged over its group"
        )
    if any(hasattr(p, "ds_tensor") and not p.numel() for p in own):
        raise ValueError(
            "loss: wanted parameters of its own that are whole on every rank, got some that"
            " ZeRO-3 has partitioned; ZeRO-1 and ZeRO-2 leave them whole"
        )


def _check_function(name, value):
    if not callable(value):
        raise TypeError(f"{name}: wanted a function, got {type(value).__name__}")


def _check_differentiable(name, value):
    """Refuses anything but a tensor of one number that requires a gradient."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: wanted a tensor of one number, got {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"{name}: wanted one number, got shape {tuple(value.shape)}")
    if not value.requires_grad:
        raise ValueError(f"{name}: wanted a number with a gradient, got one without")


def _most(parts, group, device):
    """For each column the number of micro-batches that all processes run: the largest of any."""
    counts = torch.tensor([len(column) for column in parts], device=device)
    if group is not None:
        dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    return counts.tolist()


def _work(encoders, parts, counts):
    """[(encode, micro-batch, index of its column, whether its embeddings are used)]."""
    work = []
    for number, (column, count) in enumerate(zip(parts, counts, strict=True)):
        encode = encoders[number % len(encoders)]
        more = [column[0]] * (count - len(column))
        work += [(encode, part, number, True) for part in column]
        work += [(encode, part, number, False) for part in more]
    return work


def _encoded(encode, part, number):
    """The embeddings (n, D) of one micro-batch; number: the index of its column."""
    texts = isinstance(part, (list, tuple)) and part and isinstance(part[0], str)
    if texts and isinstance(encode, torch.nn.Module):
        raise TypeError(
            f"columns[{number}]: wanted what the forward of {type(encode).__name__} takes, got"
            " texts; for these `encode` is an Encoder, a SentenceTransformer or a function of texts"
        )
    encoded = encode(part)
    if not isinstance(encoded, torch.Tensor) or encoded.dtype not in FLOATING:
        kind = getattr(encoded, "dtype", type(encoded).__name__)
        raise TypeError(f"encode: wanted floating-point embeddings, got {kind}")
    if encoded.dim() == 0:
        raise ValueError("encode: wanted embeddings (n, D), got one number")
    if _generators(encoded.device.type) is None:
        raise ValueError(
            "encode: wanted embeddings on a device whose random state torch can set back for the"
            f" second pass, got {encoded.device}"
        )
    return encoded


def _joined(parts, number):
    """The embeddings (N, D) of a column from those of its micro-batches."""
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"encode: wanted embeddings of one width for columns[{number}], got micro-batches of"
            f" rows {' and '.join(map(str, shapes))}"
        )
    return torch.cat(parts)


class _OfTexts:
    """A text model as a function: a list of texts, or an input of its `forward`, -> (n, D)."""

    def __init__(self, model):
        self.model = model

    def __call__(self, part):
        if isinstance(part, (list, tuple)):
            tokenize = getattr(self.model, "preprocess", None) or self.model.tokenize
            device = next(self.model.parameters()).device
            part = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in tokenize(list(part)).items()
            }
        output = self.model(part)
        return output["sentence_embedding"] if isinstance(output, Mapping) else output


def _of_texts(encode):
    """`encode`, an Encoder or a SentenceTransformer as a function of texts."""
    named = type(encode).__name__ in ("Encoder", "SentenceTransformer")
    return _OfTexts(encode) if named and hasattr(encode, "tokenize") else encode


class MicroBatches(list):
    """A column that is already cut into micro-batches: a list of inputs of `encode`."""

    @classmethod
    def of(cls, column, size, name="column", empty=False):
        """Cuts a tensor, a mapping of tensors or a list of examples into parts of `size` rows.

        empty: whether a column may have no rows; the result is then one part without rows.
        """
        size = int_of("size", size, 1)
        several = isinstance(column, tuple) and column and all(map(torch.is_tensor, column))
        if several or not isinstance(column, (Mapping, torch.Tensor, list, tuple)):
            kind = type(column).__name__
            if several:
                kind = "tuple of tensors: parts of the rows go into a mapping, rows into a list"
            raise TypeError(f"{name}: wanted a tensor, a mapping of tensors or a list, got {kind}")
        tensors = list(_tensors(column))
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError(f"{name}: wanted tensors (N, ...), got a tensor of one number")
        counts = set(map(len, tensors if isinstance(column, Mapping) else [column]))
        if len(counts) != 1:
            came = sorted(counts) or "no tensor"
            raise ValueError(f"{name}: wanted tensors of equally many rows, got {came}")
        if 0 in counts and not empty:
            raise ValueError(f"{name}: wanted at least one row, got 0")
        starts = range(0, max(1, *counts), size)
        return cls(_rows(column, start, start + size) for start in starts)


def _tensors(column):
    """Yields the tensors of a column: itself, or the tensors in a mapping, which may be nested."""
    if isinstance(column, torch.Tensor):
        yield column
    elif isinstance(column, Mapping):
        for value in column.values():
            yield from _tensors(value)


def _rows(column, start, stop):
    if not isinstance(column, Mapping):
        return column[start:stop]
    return {
        key: _rows(value, start, stop) if isinstance(value, (torch.Tensor, Mapping)) else value
        for key, value in column.items()
    }


def _random_state():
    """{device type: state of its default generators} for the CPU and an accelerator in use."""
    return {kind: _generators(kind)[0]() for kind in ("cpu", *_accelerator())}


def _set_random_state(states):
    for kind, state in states.items():
        _generators(kind)[1](state)


def _accelerator():
    """[device type] of the accelerator, [] if it is not in use or has no state to set back."""
    device = torch.accelerator.current_accelerator()
    if device is None or _generators(device.type) is None:
        return []
    # Reading the state of a device that is not in use would initialise it.
    begun = getattr(torch.get_device_module(device), "is_initialized", None)
    return [device.type] if begun is None or begun() else []


def _generators(kind):
    """The functions (get, set) of the state of a device type's default generators, or None."""
    module = torch if kind == "cpu" else getattr(torch, kind, None)
    for name in ("rng_state_all", "rng_state"):  # of all devices, or of the only one
        ways = [getattr(module, f"{way}_{name}", None) for way in ("get", "set")]
        if all(ways):
            return ways
    return None
