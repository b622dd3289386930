"""transformers.Trainer for an encoder and a loss of fastsim."""

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
from fastsim.training.checkpoints import begin, check_ours, remove_failed, remove_older, seal
from fastsim.training.links import LinkedBatches, LinkedRows
from fastsim.training.models import Bound
from fastsim.training.resumed import Resumed, write_sums
from fastsim.training.sharding import WholeTask, any_process, local_part


class _Loader(torch.utils.data.DataLoader):
    """A loader that passes the epoch to its batch sampler, like the loaders of accelerate."""

    def set_epoch(self, epoch):
        self.batch_sampler.set_epoch(epoch)


class Trainer(transformers.Trainer):
    """transformers.Trainer with our batches and our evaluation.

    batches: a batch sampler for all processes; None: transformers shuffles the rows. batch_size:
    rows of a batch over all processes. micro_batch_size: rows that `GradCache` encodes at a time;
    None: all. task: the `Task`, which evaluates the model. loss_learning_rate: for the parameters
    of the loss; None: that of the encoder. The metrics of the batches (`fastsim.metrics`) are
    logged as `batch_...`. If a loss or weight is not finite, the training ends before it is saved.
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
            zero["stage3_gather_16bit_weights_on_model_save"] = True  # saves unsharded weights
        self._whole = WholeTask(task, self.accelerator) if self.is_sharded else None
        self._best = None  # the folder of the best weights, if the model is sharded
        self._not_finite = None  # on the device: whether a loss was not finite
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.loss_learning_rate = loss_learning_rate
        self._resumed, self._began = None, time.monotonic()
        self.batch_metrics = log_metrics(self)

    def get_train_dataloader(self):
        """The batches of this process: its share of the batches of all processes."""
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
        # For several processes the batches are divided already; accelerate would divide them again.
        return self.accelerator.prepare(loader) if ranks == 1 else loader

    def training_step(self, model, inputs, num_items_in_batch=None):
        """As in transformers, or with `GradCache` if there is a micro_batch_size."""
        value = self._step(model, inputs, num_items_in_batch)
        bad = ~value.detach().isfinite()
        self._not_finite = bad if self._not_finite is None else self._not_finite | bad
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
        # accelerate has wrapped the model with autocast, but not the loss.
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            value = cache.backward(
                *columns,
                scale=lambda loss: (loss if scaler is None else scaler.scale(loss)) / steps,
            )
        if self.is_deepspeed_enabled and self.accelerator.sync_gradients:
            model.step()  # with DeepSpeed accelerate's optimizer does nothing
        return value / steps

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The metrics of the task, logged under `eval_...`."""
        if self.is_sharded:
            self._whole.fill(self.model_wrapped)
        metrics = (self._whole or self.task).evaluate()
        if self.accelerator.num_processes > 1:
            # Metrics that differ by rounding could end the training in some processes only.
            (metrics,) = broadcast_object_list([metrics])
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def log(self, logs, start_time=None):
        """As in transformers, but a loss that is not finite ends the training.

        The last entry covers all processes and, after a resumption, the whole training.
        """
        self.check_finite(weights=False)
        if "train_loss" in logs:
            # The total of each process holds its share of the losses since the last log.
            totals = gather_object([self._total_loss_scalar])
            logs["train_loss"] = sum(totals) / len(totals) / max(1, self.state.global_step)
            if self._resumed is not None:
                self._resumed.complete(logs)
            # transformers counts a full batch for every step, although some are smaller.
            rows = self.state.epoch * len(self.train_dataset)
            logs["train_samples_per_second"] = round(rows / logs["train_runtime"], 3)
        super().log(logs, start_time)

    def resume(self, checkpoint=None, say=print):
        """Train from the start or from a checkpoint; if no steps remain, only load the checkpoint.

        say: a function of one line of text, called if the best model cannot be used.
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
        # The last entry of the log, which the run had not come to.
        self._total_loss_scalar = resumed.total_loss()
        logs = {
            "train_runtime": self.seconds() - resumed.seconds,
            "total_flos": state.total_flos,
            "train_loss": None,  # `log` fills it in
        }
        self.log(logs)
        return TrainOutput(state.global_step, logs["train_loss"], logs)

    def seconds(self):
        """The seconds of training so far, including those before it was resumed."""
        before = 0.0 if self._resumed is None else self._resumed.seconds
        return before + time.monotonic() - self._began

    def whole_task(self):
        """The task with an unsharded model: itself, or its copy if the model is sharded."""
        if not self.is_sharded:
            return self.task
        if self._best is None:
            self._whole.fill(self.model_wrapped)
        else:
            self._whole.read(self._best)
        return self._whole

    def _determine_best_metric(self, metrics, trial):
        """As in transformers; also saves a new best model between two checkpoints.

        Later models are compared with its metric, so it has to exist at the end.
        """
        better = super()._determine_best_metric(metrics, trial)
        self.control.should_save |= better
        return better

    def _load_best_model(self):
        """As in transformers; of a sharded model only the unsharded copy reads the best weights."""
        if self.is_sharded:
            self._best = Path(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def save_model(self, output_dir=None, _internal_call=False):
        """As in transformers; saves unsharded weights, which `whole_task` reads."""
        if not self.is_sharded:
            return super().save_model(output_dir, _internal_call)
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self.args.should_save:  # the others' states are empty
            self._save(output_dir, state_dict=state)

    def check_finite(self, *, weights=True):
        """FloatingPointError if a loss so far, or a current weight, is not finite."""
        hint = "try a smaller learning rate or --precision fp32"
        step = self.state.global_step
        if self._not_finite is not None and bool(self._not_finite):
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
        """As in transformers, with copies of tied weights under each of their names.

        safetensors refuses tensors that share memory.
        """
        state = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, state_dict=_unshared(state))

    def _save_checkpoint(self, model, trial):
        """As in transformers, but refuses weights that are not finite, and adds a manifest.

        Then removes older checkpoints, and nothing else.
        """
        self.check_finite()
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            check_ours(folder)  # the user may have made the folder meanwhile
        try:
            with full_disk_named(folder):
                if self.args.should_save and not folder.exists():
                    begin(folder)
                if self.accelerator.num_processes > 1:
                    torch.distributed.barrier()  # the other processes write into the folder
                super()._save_checkpoint(model, trial)
                write_sums(self, folder)
                if self.accelerator.num_processes > 1:
                    torch.distributed.barrier()  # every process writes its random state
                if self.args.should_save and folder.is_dir():
                    seal(folder)
        except Exception:  # of many types: some libraries have their own for a full disk
            remove_failed(folder)
            raise
        if self.args.should_save:
            remove_older(folder.parent, self.state.best_model_checkpoint)

    def get_decay_parameter_names(self, model):
        """As in transformers, without the learnt options of the loss."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.startswith("objective.learnt.")]

    def create_optimizer(self, model=None):
        """As in transformers, with a separate group for the parameters of the loss."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        objective = getattr(self.model, "objective", None)
        if is_new and self.loss_learning_rate is not None and objective is not None:
            loss_ids = {id(parameter) for parameter in objective.parameters()}
            for group in list(optimizer.param_groups):
                loss_parameters = [p for p in group["params"] if id(p) in loss_ids]
                if loss_parameters:
                    group["params"] = [p for p in group["params"] if id(p) not in loss_ids]
                    options = {key: value for key, value in group.items() if key != "params"}
                    optimizer.add_param_group(
                        {**options, "params": loss_parameters, "lr": self.loss_learning_rate}
                    )
        return optimizer


def _unshared(state):
    """The state, with a copy of each tensor that shares the memory of an earlier one."""
    result, pointers = {}, set()
    for name, value in state.items():
        pointer = value.untyped_storage().data_ptr()
        result[name] = value.clone() if pointer in pointers else value
        pointers.add(pointer)
    return result
