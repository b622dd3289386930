"""Encodes batches of texts, in this process or in several."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch

_QUEUED = 4  # batches per process, so that none is idle


def encode_batches(encoder, batches, prefix):
    """Yields embeddings (N, dim) of each list of texts, on the encoder's device.

    prefix: text put before each text. There is no dropout and no gradient.
    """
    was_training = encoder.training
    encoder.eval()
    try:
        for texts in batches:
            with torch.no_grad():
                features = encoder.tokenize(texts, prefix)
                yield encoder({name: value.to(encoder.device) for name, value in features.items()})
    finally:
        encoder.train(was_training)


def encode_in_processes(encoder, batches, prefix, devices):
    """As `encode_batches`, in a fresh process per device; yields embeddings on the CPU.

    The processes map the weights from a file, so that they share its memory.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fastsim-") as folder:
        file = Path(folder) / "encoder.pt"
        torch.save(encoder, file)
        free_devices = context.Queue()
        for device in devices:
            free_devices.put(str(device))
        cpus = sum(torch.device(device).type == "cpu" for device in devices)
        threads = max(1, torch.get_num_threads() // max(cpus, 1))
        pool = concurrent.futures.ProcessPoolExecutor(
            len(devices), context, _start, (str(file), free_devices, threads)
        )
        with pool:
            rest, queue = iter(batches), collections.deque()
            for texts in itertools.islice(rest, _QUEUED * len(devices)):
                queue.append(pool.submit(_encode, texts, prefix))
            try:
                while queue:
                    values, dtype = queue.popleft().result()
                    for texts in itertools.islice(rest, 1):
                        queue.append(pool.submit(_encode, texts, prefix))
                    yield torch.from_numpy(values).view(dtype)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _start(file, free_devices, threads):
    """Initialise a process: load the encoder onto the next free device."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel already
    torch.set_num_threads(threads)
    _encoder = torch.load(file, weights_only=False, mmap=True).to(free_devices.get())


def _encode(texts, prefix):
    # As an array: tensors are passed in shared memory, of which containers have little. As bytes:
    # numpy has no bfloat16.
    (vectors,) = encode_batches(_encoder, [texts], prefix)
    return vectors.cpu().contiguous().view(torch.uint8).numpy(), vectors.dtype
