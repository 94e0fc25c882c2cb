"""A trainer in a process of its own: its Python threads and its launches of kernels share a GIL with nobody.

`TrainerProcess` starts it and knows how it ends, `ProcessTrainer` keeps `training.interface.Trainer` on it. Messages
(`messages.py`) go over a socket pair that only the two processes have; arrays go beside them in shared memory that has
no name and belongs to whoever receives it (`channel.py`), so nothing can be left behind. `child.py` is the other side.
"""

from tinker_local.backend.training.process.process import TrainerProcess
from tinker_local.backend.training.process.trainer import ProcessTrainer

__all__ = ["ProcessTrainer", "TrainerProcess"]
