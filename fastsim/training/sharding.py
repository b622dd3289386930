"""Models whose weights the processes share: FSDP2 and DeepSpeed, as accelerate is configured.

accelerate wraps the model and reduces its gradients. What a run needs beside that is the whole
model, to evaluate and to write it: a copy on the first process, filled from the shards.
"""

import copy
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from fastsim.agreement import raised_together


def asked_for():
    """ "FSDP", "DEEPSPEED" or None: what accelerate's configuration says; ValueError for FSDP1."""
    asked = [name for name in ("FSDP", "DEEPSPEED") if _is_true(f"ACCELERATE_USE_{name}")]
    if "FSDP" in asked and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            "FSDP_VERSION: wanted 2 (fsdp_version: 2 in accelerate's configuration), got"
            f" {os.environ.get('FSDP_VERSION', '1')}"
        )
    return asked[0] if asked else None


def _is_true(name):
    return os.environ.get(name, "").lower() in ("true", "1")


def whole_while_loading():
    """Variables with which every process loads whole weights, which it evaluates before training.

    accelerate's `fsdp_cpu_ram_efficient_loading` would leave all but the first without.
    """
    return {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"} if asked_for() == "FSDP" else {}


class WholeTask:
    """A `Task` with a whole copy of the model on the first process; the others follow it.

    All processes call its methods together.
    """

    def __init__(self, task, accelerator):
        self._accelerator, self._main = accelerator, accelerator.is_main_process
        self._task = None
        if self._main:
            same = {id(dist.group.WORLD): dist.group.WORLD}  # a group is not copied
            model = copy.deepcopy(task.model, same).cpu()
            self._task = replace(task, model=model, encoder=model.encoder)

    def fill(self, model):
        """Copies the weights as they are now; model: as accelerate wrapped it."""
        state = self._accelerator.get_state_dict(model)
        if self._main:
            self._task.model.load_state_dict(state)

    def read(self, folder):
        """Copies the weights from a checkpoint's folder."""
        from safetensors.torch import load_file

        if self._main:
            self._task.model.load_state_dict(load_file(folder / "model.safetensors"))

    def evaluate(self):
        """Metrics of the copy, on every process."""
        return self._on_main(lambda: self._placed(self._task.evaluate))

    def loss_values(self):
        """The options of the loss, learnt ones with them, on every process."""
        return self._on_main(lambda: self._task.loss_values())

    def sample(self):
        """As `Task.sample`, on the first process, which alone calls it."""
        return self._placed(self._task.sample)

    def write_to(self, folder):
        """The model's files, by the first process, which alone calls it."""
        self._task.write_to(folder)

    @property
    def encoder(self):
        """The whole encoder, on the first process."""
        return self._task.encoder

    def _placed(self, call):
        self._task.model.to(self._accelerator.device)
        try:
            return call()
        finally:
            self._task.model.cpu()

    def _on_main(self, call):
        found = [None]
        with raised_together(dist.group.WORLD):
            if self._main:
                found = [call()]
        dist.broadcast_object_list(found, 0)
        return found[0]


def local_part(parameter):
    """What this process holds of a parameter: of a DTensor, or of ZeRO-3."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def any_process(flag, device):
    """Whether a flag is set on any process."""
    told = torch.tensor(int(flag), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)
