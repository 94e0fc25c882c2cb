"""The kinds of frozen matrices, by the name in `TrainerConfig.weights`."""

from collections.abc import Mapping

from tinker_local.backend.weights.dense import dense
from tinker_local.backend.weights.frozen_matrix import MakeMatrix

KINDS: Mapping[str, MakeMatrix] = {"dense": dense}
