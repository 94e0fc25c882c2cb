"""Everything behind the API. `InProcessBackend` is the entry point; nothing heavy loads until it starts.

`InProcessBackend` is imported on first access, so that `tinker-local --help` loads neither numpy nor SQLAlchemy.
"""

from typing import TYPE_CHECKING

from tinker_local.backend.options import BackendOptions as BackendOptions
from tinker_local.backend.options import ModelSource as ModelSource

if TYPE_CHECKING:
    from tinker_local.backend.backend import InProcessBackend as InProcessBackend
else:

    def __getattr__(name: str) -> object:
        if name != "InProcessBackend":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tinker_local.backend.backend import InProcessBackend

        return InProcessBackend
