"""Encoding batch after batch, in this process or in several."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch

_WAITING = 4  # batches that each process has before it, so that none runs dry


def encode_batches(encoder, batches, prefix):
    """Yields (N, dim) of each list of texts, on the encoder's device; no dropout, no gradient."""
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
    """As `encode_batches`, in a fresh process for each device; what it yields is on the CPU.

    The weights go by a file that the processes map, so that those on one machine share them.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fastsim-") as folder:
        file = Path(folder) / "encoder.pt"
        torch.save(encoder, file)
        places = context.Queue()
        for device in devices:
            places.put(str(device))
        cpus = sum(torch.device(device).type == "cpu" for device in devices)
        threads = max(1, torch.get_num_threads() // max(cpus, 1))
        pool = concurrent.futures.ProcessPoolExecutor(
            len(devices), context, _start, (str(file), places, threads)
        )
        with pool:
            rest, waiting = iter(batches), collections.deque()
            for texts in itertools.islice(rest, _WAITING * len(devices)):
                waiting.append(pool.submit(_encode, texts, prefix))
            try:
                while waiting:
                    values, dtype = waiting.popleft().result()
                    for texts in itertools.islice(rest, 1):
                        waiting.append(pool.submit(_encode, texts, prefix))
                    yield torch.from_numpy(values).view(dtype)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def _start(file, places, threads):
    """A process takes a device and the encoder."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallel part
    torch.set_num_threads(threads)
    _encoder = torch.load(file, weights_only=False, mmap=True).to(places.get())


def _encode(texts, prefix):
    # As an array: tensors would travel in shared memory, which containers have little of. Of bytes,
    # as numpy has no bfloat16.
    (vectors,) = encode_batches(_encoder, [texts], prefix)
    return vectors.cpu().contiguous().view(torch.uint8).numpy(), vectors.dtype
