"""Training on rows of data: what they are, how they become data of the SDK, and the loop.

`train("answers.jsonl", model="Qwen/Qwen3-4B", out="runs/answers")` is a whole run. A program extends it with an
`Objective`, an `Evaluation` or a `Tracker` of its author's.
"""

from tinker_local.client.train.evaluate import Evaluation as Evaluation
from tinker_local.client.train.evaluate import read_evaluation as read_evaluation
from tinker_local.client.train.examples import BadRows as BadRows
from tinker_local.client.train.examples import Example as Example
from tinker_local.client.train.examples import Preference as Preference
from tinker_local.client.train.examples import Problem as Problem
from tinker_local.client.train.examples import Rows as Rows
from tinker_local.client.train.loop import DivergedError as DivergedError
from tinker_local.client.train.media import MediaRules as MediaRules
from tinker_local.client.train.objectives import Objective as Objective
from tinker_local.client.train.objectives import Pending as Pending
from tinker_local.client.train.objectives import Supervised as Supervised
from tinker_local.client.train.preferences import Preferences as Preferences
from tinker_local.client.train.rendering import Renderer as Renderer
from tinker_local.client.train.rows import read_rows as read_rows
from tinker_local.client.train.settings import TrainSettings as TrainSettings
from tinker_local.client.train.trackers import Tracker as Tracker
from tinker_local.client.train.train_run import TrainReport as TrainReport
from tinker_local.client.train.train_run import train as train
