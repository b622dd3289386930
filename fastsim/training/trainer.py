"""transformers.Trainer around an encoder and a loss of fastsim."""

import shutil
import time
from pathlib import Path

import torch
import transformers
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list, gather_object
from transformers.trainer_utils import TrainOutput

from fastsim.files import full_disk_named
from fastsim.grad_cache import GradCache
from fastsim.integrations.transformers import log_metrics
from fastsim.training.batches import SharedBatches, SharedRows
from fastsim.training.checkpoints import begin, check_ours, remove_older, seal
from fastsim.training.links import LinkedBatches, LinkedRows
from fastsim.training.models import Bound
from fastsim.training.resumed import Resumed, write_sums
from fastsim.training.sharding import WholeTask, any_process, local_part


class _Loader(torch.utils.data.DataLoader):
    """A loader that hands the epoch on, as those that accelerate prepares."""

    def set_epoch(self, epoch):
        self.batch_sampler.set_epoch(epoch)


class Trainer(transformers.Trainer):
    """transformers.Trainer with batches of our own and our evaluation.

    batches: a batch sampler over all processes, or None: rows as transformers shuffles them.
    batch_size: rows of a batch over all processes. micro_batch_size: rows that are encoded at
    once, by `GradCache`; None: all. task: the `Task`, which evaluates the model being trained
    where it has data for it. loss_learning_rate: for the loss's own parameters, by default that of
    the encoder. What losses see of their batches (`fastsim.metrics`) is logged beside the loss as
    `batch_...`. A loss or a weight that is not finite ends the training before anything is saved.
    """

    def __init__(
        self,
        *,
        batches,
        batch_size,
        micro_batch_size=None,
        task=None,
        loss_learning_rate=None,
        **options,
    ):
        super().__init__(**options)
        self.batches, self.task = batches, task
        self.is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if self.is_deepspeed_enabled:
            zero = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
            zero["stage3_gather_16bit_weights_on_model_save"] = True  # what is saved is whole
        self._whole = WholeTask(task, self.accelerator) if self.is_sharded else None
        self._best = None  # the folder of the best weights, where they are not loaded
        self._bad = None  # on the device: whether a loss was not finite
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.loss_learning_rate = loss_learning_rate
        self._resumed, self._began = None, time.monotonic()
        self.seen = log_metrics(self)

    def get_train_dataloader(self):
        """The batches of this process: its share of those that one process would have."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        batches, rows = self.batches, self.train_dataset
        if batches is None:
            if ranks == 1:
                return super().get_train_dataloader()
            shuffled = SeedableRandomSampler(rows, data_seed=self.args.data_seed)
            batches = torch.utils.data.BatchSampler(shuffled, self.batch_size, drop_last=False)
        elif isinstance(batches, LinkedBatches):
            rows = LinkedRows(rows)
        if ranks > 1:
            objective = getattr(self.model, "objective", None)
            pairwise = getattr(objective, "pairwise", False)
            batches, rows = SharedBatches(batches, rank, ranks, whole=pairwise), SharedRows(rows)
        loader = _Loader(
            rows,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        # With several processes the batches are shared already; accelerate would do it again.
        return self.accelerator.prepare(loader) if ranks == 1 else loader

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As in transformers, or with a micro_batch_size by `GradCache`."""
        value = self._step(model, inputs, num_items_in_batch)
        bad = ~value.detach().isfinite()
        self._bad = bad if self._bad is None else self._bad | bad
        return value

    def _step(self, model, inputs, num_items_in_batch):
        if self.micro_batch_size is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = self._prepare_inputs(inputs)
        columns = inputs.pop("features")
        cache = GradCache(
            model, Bound(self.model.objective, **inputs), micro_batch_size=self.micro_batch_size
        )
        steps, scaler = self.current_gradient_accumulation_steps, self.accelerator.scaler
        if self.is_deepspeed_enabled:
            model.set_gradient_accumulation_boundary(self.accelerator.sync_gradients)
        with self.compute_loss_context_manager():
            value = cache.backward(
                *columns,
                scale=lambda loss: (loss if scaler is None else scaler.scale(loss)) / steps,
            )
        if self.is_deepspeed_enabled and self.accelerator.sync_gradients:
            model.step()  # accelerate's optimizer leaves it to the engine
        return value / steps

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The metrics of the task, logged under `eval_...`."""
        if self.is_sharded:
            self._whole.fill(self.model_wrapped)
        found = (self._whole or self.task).evaluate()
        if self.accelerator.num_processes > 1:
            # Rounded otherwise, metrics of their own could end the training of some alone.
            (found,) = broadcast_object_list([found])
        found = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def log(self, logs, start_time=None):
        """As in transformers, but a loss that is not finite ends the training.

        The last entry is of all processes, and of all parts of a training that was resumed.
        """
        self.check_finite(weights=False)
        if "train_loss" in logs:
            # Each process has the losses since the last that was logged of its own share.
            totals = gather_object([self._total_loss_scalar])
            logs["train_loss"] = sum(totals) / len(totals) / max(1, self.state.global_step)
            if self._resumed is not None:
                self._resumed.complete(logs)
            # transformers counts a full batch for every step.
            rows = self.state.epoch * len(self.train_dataset)
            logs["train_samples_per_second"] = round(rows / logs["train_runtime"], 3)
        super().log(logs, start_time)

    def resume(self, checkpoint=None, say=print):
        """Train from the start or a checkpoint; one at which the training ended is only loaded.

        say: is told of a best model that cannot be used.
        """
        if checkpoint is None:
            return self.train()
        self._resumed = resumed = Resumed(self, checkpoint, say)
        steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        state = resumed.state
        if state.global_step < steps and not resumed.stopped_early():
            self.add_callback(resumed)
            return self.train(resume_from_checkpoint=str(checkpoint))
        state.max_steps, self.state = steps, state
        best = resumed.best if self.args.load_best_model_at_end else None
        folder = checkpoint if best is None else best
        if self.is_sharded:
            self._best = folder
        else:
            self._load_from_checkpoint(str(folder))
        return TrainOutput(state.global_step, 0.0, {"train_runtime": resumed.seconds})

    def seconds(self):
        """How long the training took so far, with the parts before it was resumed."""
        before = 0.0 if self._resumed is None else self._resumed.seconds
        return before + time.monotonic() - self._began

    def whole_task(self):
        """The task with all weights of its model: itself, or its copy where they are sharded."""
        if not self.is_sharded:
            return self.task
        if self._best is None:
            self._whole.fill(self.model_wrapped)
        else:
            self._whole.read(self._best)
        return self._whole

    def _determine_best_metric(self, metrics, trial):
        """As in transformers; a new best model is saved, also between two checkpoints.

        Its metric is what later ones are compared with, so it must be there at the end.
        """
        better = super()._determine_best_metric(metrics, trial)
        self.control.should_save |= better
        return better

    def _load_best_model(self):
        """As in transformers; of sharded models the copy reads the best weights."""
        if self.is_sharded:
            self._best = Path(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def save_model(self, output_dir=None, _internal_call=False):
        """As in transformers; of sharded models whole weights, for `whole_task`."""
        if not self.is_sharded:
            return super().save_model(output_dir, _internal_call)
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.args.should_save:  # the others' states are empty
            self._save(output_dir, state_dict=state)

    def check_finite(self, *, weights=True):
        """FloatingPointError where a loss since the start, or a weight now, is not finite."""
        hint = "try a smaller learning rate or --precision fp32"
        step = self.state.global_step
        if self._bad is not None and bool(self._bad):
            raise FloatingPointError(f"the loss became NaN or infinite by step {step}: {hint}")
        if not weights:
            return
        for name, parameter in self.model.named_parameters():
            bad = not bool(local_part(parameter).isfinite().all())
            if any_process(bad, self.args.device) if self.is_sharded else bad:
                raise FloatingPointError(
                    f"the weights {name} became NaN or infinite by step {step}: {hint}"
                )

    def _save(self, output_dir=None, state_dict=None):
        """As in transformers, tied weights under each of their names.

        safetensors refuses memory that several names share.
        """
        given = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, state_dict=_unshared(given))

    def _save_checkpoint(self, model, trial):
        """As in transformers, but only what is finite, and sealed with sizes and hashes.

        Older checkpoints are removed then, and nothing else.
        """
        self.check_finite()
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            check_ours(folder)  # the user may have made it since the run began
        try:
            with full_disk_named(folder):
                if self.args.should_save and not folder.exists():
                    begin(folder)
                if self.accelerator.num_processes > 1:
                    torch.distributed.barrier()  # the others write into it
                super()._save_checkpoint(model, trial)
                write_sums(self, folder)
                if self.accelerator.num_processes > 1:
                    torch.distributed.barrier()  # every process writes its random state
                if self.args.should_save and folder.is_dir():
                    seal(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # it is no use, and the disk is full
            raise
        if self.args.should_save:
            remove_older(folder.parent, self.state.best_model_checkpoint)

    def get_decay_parameter_names(self, model):
        """As in transformers, without the loss's own numbers."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.startswith("objective.learnt.")]

    def create_optimizer(self, model=None):
        """As in transformers, the loss's own parameters with their own learning rate."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        objective = getattr(self.model, "objective", None)
        if fresh and self.loss_learning_rate is not None and objective is not None:
            own = {id(parameter) for parameter in objective.parameters()}
            for group in list(optimizer.param_groups):
                ours = [p for p in group["params"] if id(p) in own]
                if ours:
                    group["params"] = [p for p in group["params"] if id(p) not in own]
                    kept = {key: value for key, value in group.items() if key != "params"}
                    optimizer.add_param_group(
                        {**kept, "params": ours, "lr": self.loss_learning_rate}
                    )
        return optimizer


def _unshared(state):
    """A state whose tensors have memory of their own: copies where an earlier name has it."""
    found, seen = {}, set()
    for name, value in state.items():
        place = value.untyped_storage().data_ptr()
        found[name] = value.clone() if place in seen else value
        seen.add(place)
    return found
