"""Ends a run early on SIGTERM or Ctrl-C, and saves checkpoints by time."""

import contextlib
import signal
import threading
import time

import torch
import transformers


class Stopped(RuntimeError):  # noqa: N818 - not an error: the run can be resumed
    """A signal ended the run after writing a checkpoint. `signal`: the number of the signal."""

    def __init__(self, message, number):
        super().__init__(message)
        self.signal = number


class Watch(transformers.TrainerCallback):
    """Ends the training after the step in which a signal arrives, and saves every few minutes.

    minutes: of training between two checkpoints. several: whether several processes train together;
    then all stop or save after the same step.
    """

    def __init__(self, minutes, *, several=False):
        self.seconds, self.several = 60 * minutes, several
        self.signal, self._saved = 0, None

    @contextlib.contextmanager
    def listening(self):
        """A context in which the first SIGTERM or Ctrl-C waits for the end of the step."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            handlers[number] = signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _remember(self, number, frame):
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def on_train_begin(self, args, state, control, **more):
        # The state of a resumed run has the intervals of the earlier run.
        state.compute_steps(args, state.max_steps)
        self._saved = time.monotonic()

    def on_step_end(self, args, state, control, **more):
        late = time.monotonic() - self._saved > self.seconds
        stop, save = self._agree(self.signal, int(late))
        if stop:
            self.signal = stop
            control.should_training_stop = True
        # At the end of an epoch transformers saves by itself, after the evaluation.
        saved_later = args.save_strategy == "epoch" and _ends_epoch(state)
        if (stop or save) and not saved_later:
            control.should_save = True

    def on_epoch_end(self, args, state, control, **more):
        if self.signal and not _ends_epoch(state):
            # transformers treats a stop as the end of the epoch. The step has been saved already.
            control.should_evaluate = control.should_save = False

    def on_save(self, args, state, control, **more):
        self._saved = time.monotonic()

    def _agree(self, *numbers):
        if not self.several:
            return numbers
        largest = torch.tensor(numbers)
        if torch.distributed.get_backend() == "nccl":
            largest = largest.cuda()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        return largest.tolist()


def _ends_epoch(state):
    """Whether a step is the last one of its epoch or of the training."""
    return state.global_step >= state.max_steps or float(state.epoch).is_integer()
