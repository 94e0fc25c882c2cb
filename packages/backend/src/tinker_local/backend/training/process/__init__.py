"""A trainer in a separate process, so that its Python threads and kernel launches do not compete for the server's GIL.

`TrainerProcess` starts and ends the process; `ProcessTrainer` implements `training.trainer.Trainer` on it. Messages
(`messages.py`) go over a socket pair that only the two processes have. Arrays travel beside them in shared memory. The
memory has no name and belongs to the receiver (`channel.py`), so nothing is left behind. `child.py` is the program that
runs in the process.
"""

from tinker_local.backend.training.process.process import TrainerProcess
from tinker_local.backend.training.process.process_trainer import ProcessTrainer

__all__ = ["ProcessTrainer", "TrainerProcess"]
