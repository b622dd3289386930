"""Models sharded over processes by FSDP2 or DeepSpeed, according to accelerate's configuration.

accelerate wraps the model and reduces its gradients. A run also needs all weights in one place, to
evaluate and to write the model: the first process has a copy that is filled from the shards.
"""

import copy
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from fastsim.agreement import raised_together


def configured():
    """ "FSDP", "DEEPSPEED" or None, from accelerate's configuration; ValueError for FSDP1."""
    names = [name for name in ("FSDP", "DEEPSPEED") if _is_true(f"ACCELERATE_USE_{name}")]
    if "FSDP" in names and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "FSDP_VERSION: wanted 2 (fsdp_version: 2 in accelerate's configuration), got"
            f" {os.environ.get('FSDP_VERSION', '1')}"
        )
    return names[0] if names else None


def _is_true(name):
    return os.environ.get(name, "").lower() in ("true", "1")


def loading_variables():
    """Environment variables that make every process load all weights, to evaluate the model.

    With accelerate's `fsdp_cpu_ram_efficient_loading` only the first process would load them.
    """
    return {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"} if configured() == "FSDP" else {}


class WholeTask:
    """A `Task` with an unsharded copy of the model on the first process.

    All processes call its methods together, and get the results of the first one.
    """

    def __init__(self, task, accelerator):
        self._accelerator, self._main = accelerator, accelerator.is_main_process
        self._task = None
        if self._main:
            not_copied = {id(dist.group.WORLD): dist.group.WORLD}
            model = copy.deepcopy(task.model, not_copied).cpu()
            self._task = replace(task, model=model, encoder=model.encoder)

    def fill(self, model):
        """Copy the current weights of a model that accelerate has wrapped."""
        state = self._accelerator.get_state_dict(model)
        if self._main:
            self._task.model.load_state_dict(state)

    def read(self, folder):
        """Copy the weights from the folder of a checkpoint."""
        from safetensors.torch import load_file

        if self._main:
            self._task.model.load_state_dict(load_file(folder / "model.safetensors"))

    def evaluate(self):
        """Metrics of the copy, on every process."""
        return self._on_main(lambda: self._on_device(self._task.evaluate))

    def loss_values(self):
        """The options of the loss, with the values of learnt ones, on every process."""
        return self._on_main(lambda: self._task.loss_values())

    def sample(self):
        """As `Task.sample`; called on the first process only."""
        return self._on_device(self._task.sample)

    def write_to(self, folder):
        """As `Task.write_to`; called on the first process only."""
        self._task.write_to(folder)

    @property
    def encoder(self):
        """The unsharded encoder, on the first process."""
        return self._task.encoder

    def _on_device(self, call):
        self._task.model.to(self._accelerator.device)
        try:
            return call()
        finally:
            self._task.model.cpu()

    def _on_main(self, call):
        result = [None]
        with raised_together(dist.group.WORLD):
            if self._main:
                result = [call()]
        dist.broadcast_object_list(result, 0)
        return result[0]


def local_part(parameter):
    """The part of a parameter that this process holds, if it is a DTensor or sharded by ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def any_process(flag, device):
    """Whether a flag is set on any process."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)
