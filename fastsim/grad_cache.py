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

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastsim.agreement import Failures, raised_together
from fastsim.autocast import joined
from fastsim.checks import FLOATING, int_of
from fastsim.dtensor import any_dtensor
from fastsim.gradient_sync import (
    accumulating,
    backpropagate_early,
    device_of,
    leaves_of,
    process_group_of,
    reducing,
    reducing_all,
    reshard_after_error,
    run_backward,
    send_buffers,
    shards_parameters,
    split_by_wrapper,
    unshard,
    wrappers_of,
)
from fastsim.micro_batches import MicroBatches
from fastsim.random_state import can_be_set_back, random_state, set_random_state

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
    are then invalid. DistributedDataParallel with `static_graph=True` is refused.
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

        columns: each a tensor (N, ...), a list of N examples, or a mapping of these, which may be
            nested; this method cuts them into micro-batches, unless they are `MicroBatches`. Other
            values in a mapping, such as a flag or a tuple, go with each micro-batch. Columns may
            differ in their number of rows.
        scale: a function of the loss; its result is differentiated instead of the loss. For example
            `torch.amp.GradScaler.scale`, or a division by the number of accumulated steps.

        Raises:
            TypeError, ValueError: for columns, embeddings or a loss that do not fit.
            RuntimeError: if another process of the same step has failed.
        """
        encoders = self._encoders_of(columns)
        if scale is not None:
            _check_function("scale", scale)
        wrappers = {id(encode): wrappers_of(encode, self.module) for encode in encoders}
        all_wrappers = [wrapper for several in wrappers.values() for wrapper in several]
        group, device = process_group_of(all_wrappers), device_of(all_wrappers)
        with raised_together(group):
            columns = self._cut(columns, may_be_empty=group is not None)
        work = _work(encoders, columns, _most(columns, group, device))
        try:
            send_buffers(all_wrappers)
            vectors, states = self._first_pass(work, len(columns), wrappers, group)
            unshard(all_wrappers)  # the loss may share parameters with the encoder
            with raised_together(group):
                value, gradients, own = self._differentiate(vectors, scale)
            del vectors
            state_after_loss = random_state()
            with accumulating(all_wrappers) as step_reduces:
                reduces = dict(zip(map(id, all_wrappers), step_reduces, strict=True))
                own = backpropagate_early(all_wrappers, own)
                self._second_pass(work, states, gradients, own, wrappers, reduces, group)
        except BaseException:
            reshard_after_error(all_wrappers)
            raise
        set_random_state(state_after_loss)
        return value

    def _encoders_of(self, columns):
        """[one encoder for all columns], or a list with one for each column."""
        encoders = self.encode if isinstance(self.encode, (list, tuple)) else [self.encode]
        if not columns or len(encoders) not in (1, len(columns)):
            wanted = "at least one" if len(encoders) == 1 else f"{len(encoders)}, one per encoder"
            raise ValueError(f"columns: wanted {wanted}, got {len(columns)}")
        return encoders

    def _cut(self, columns, *, may_be_empty):
        """The columns as a list of `MicroBatches`. may_be_empty: whether one may have no rows."""
        cut = []
        for number, column in enumerate(columns):
            name = f"columns[{number}]"
            if not isinstance(column, MicroBatches):
                column = MicroBatches.of(column, self.micro_batch_size, name, may_be_empty)
            if not column:
                raise ValueError(f"{name}: wanted at least one micro-batch, got none")
            cut.append(column)
        return cut

    def _first_pass(self, work, count, wrappers, group):
        """The embeddings of each column, and the random states before each micro-batch.

        count: the number of columns.
        """
        vectors, states = [[] for _ in range(count)], []
        failures = Failures(group)
        with torch.no_grad():
            for item in work:
                running = wrappers[id(item.encode)]
                unshard(running)
                states.append(random_state())
                with failures.caught():
                    if failures.error is None:
                        encoded = _encoded(item)
                        vectors[item.column].append(encoded if item.used else encoded[:0])
                # The next gathering of parameters would wait for a process that has failed.
                if shards_parameters(running):
                    failures.tell()
            with failures.caught():
                if failures.error is None:
                    vectors = [_joined(parts, column) for column, parts in enumerate(vectors)]
        failures.tell()
        # Weights that autocast has cast here have no graph: the second pass must cast its own.
        torch.clear_autocast_cache()
        return vectors, states

    def _second_pass(self, work, states, gradients, own, wrappers, reduces, group):
        """Encodes every micro-batch again and backpropagates the gradient of its embeddings.

        states: the random state before each micro-batch.
        gradients: those of each column's embeddings, (N, D).
        own: [(parameter of the loss, its gradient)].
        reduces: {id of a wrapper: whether it reduces after its last micro-batch}.
        """
        failures, has_graph = Failures(group), False
        last = {id(w): step for step, item in enumerate(work) for w in wrappers[id(item.encode)]}
        for step, item in enumerate(work):
            running = wrappers[id(item.encode)]
            now = [step == last[id(wrapper)] and reduces[id(wrapper)] for wrapper in running]
            with reducing(running, now):
                unshard(running)
                set_random_state(states[step])
                with failures.caught():
                    if failures.error is None:
                        encoded = item.encode(item.part)
                # Processes wait for each other in a backward pass that reduces or gathers.
                if any(now) or shards_parameters(running):
                    failures.tell()
                if failures.error is not None:
                    continue
                gradient = _take_gradient(gradients, item, encoded)
                # Of several encoders some may be frozen: their embeddings have no graph.
                pairs = [(encoded, gradient)] if encoded.requires_grad else []
                finishing = [w for w, reduces_now in zip(running, now, strict=True) if reduces_now]
                is_last = step == len(work) - 1
                of_loss, own = split_by_wrapper(own, finishing, everything=is_last)
                pairs += of_loss
                has_graph = has_graph or bool(pairs)
                with failures.caught(), reducing_all(finishing):
                    if pairs:
                        run_backward(running, *zip(*pairs, strict=True))
        with failures.caught():
            if failures.error is None and not has_graph:
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


def _most(columns, group, device):
    """For each column the number of micro-batches that all processes run: the largest of any."""
    counts = torch.tensor([len(column) for column in columns], device=device)
    if group is not None:
        dist.all_reduce(counts, dist.ReduceOp.MAX, group)
    return counts.tolist()


class _Encoding(NamedTuple):
    """A micro-batch to encode, once in each pass."""

    encode: Callable
    part: Any  # the micro-batch
    column: int  # the index of its column
    used: bool  # whether the loss gets its embeddings; False if it is only encoded again


def _work(encoders, columns, counts):
    """[`_Encoding`] of this process, `counts` of each column."""
    work = []
    for number, (column, count) in enumerate(zip(columns, counts, strict=True)):
        encode = encoders[number % len(encoders)]
        repeated = [column[0]] * (count - len(column))
        work += [_Encoding(encode, part, number, True) for part in column]
        work += [_Encoding(encode, part, number, False) for part in repeated]
    return work


def _take_gradient(gradients, item, encoded):
    """The gradient of a micro-batch's embeddings, taken off the front of those of its column."""
    if not item.used:
        return torch.zeros_like(encoded)
    column = gradients[item.column]
    gradient, gradients[item.column] = column.tensor_split([len(encoded)])
    return gradient


def _encoded(item):
    """The embeddings (n, D) of one micro-batch."""
    encode, part = item.encode, item.part
    texts = isinstance(part, (list, tuple)) and part and isinstance(part[0], str)
    if texts and isinstance(encode, torch.nn.Module):
        raise TypeError(
            f"columns[{item.column}]: wanted what the forward of {type(encode).__name__} takes, got"
            " texts; for these `encode` is an Encoder, a SentenceTransformer or a function of texts"
        )
    encoded = encode(part)
    if not isinstance(encoded, torch.Tensor) or encoded.dtype not in FLOATING:
        kind = getattr(encoded, "dtype", type(encoded).__name__)
        raise TypeError(f"encode: wanted floating-point embeddings, got {kind}")
    if encoded.dim() == 0:
        raise ValueError("encode: wanted embeddings (n, D), got one number")
    if not can_be_set_back(encoded.device.type):
        raise ValueError(
            "encode: wanted embeddings on a device whose random state torch can set back for the"
            f" second pass, got {encoded.device}"
        )
    return encoded


def _joined(parts, column):
    """The embeddings (N, D) of a column from those of its micro-batches; column: its index."""
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"encode: wanted embeddings of one width for columns[{column}], got micro-batches of"
            f" rows {' and '.join(map(str, shapes))}"
        )
    return joined(parts)


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
