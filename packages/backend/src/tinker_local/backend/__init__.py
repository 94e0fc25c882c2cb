"""Everything behind the API. `InProcessBackend` is the way in; nothing heavy loads until it starts."""

from tinker_local.backend.inprocess import InProcessBackend as InProcessBackend
from tinker_local.backend.options import BackendOptions as BackendOptions
from tinker_local.backend.options import ModelSource as ModelSource
