"""What a sampler serves beside its base model: immutable versions of adapters, by a name that is never used again.

A named version is a checkpoint of kind `sampler_weights`. A nameless one lives as long as its sampling session.
"""

import asyncio
from functools import partial

from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.sampling.interface import AdapterVersion
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.storage.versions import VersionFolders


class SamplerVersions:
    """Where the weights of each version lie, and how they are taken from the sampler again."""

    def __init__(self, store: Store, folders: VersionFolders, models: ServedModels) -> None:
        self._store = store
        self._folders = folders
        self._base_models = models

    def named(self, record: CheckpointRecord) -> AdapterVersion:
        """Of a checkpoint; one that was saved again under the same name is another version."""
        name = f"{record.tinker_path}@{record.created_at.isoformat()}"
        return AdapterVersion(name, self._store.checkpoint_folder(record))

    def nameless(self, name: str) -> AdapterVersion:
        """What was published as `name`; NotFoundError if there is no such version."""
        return AdapterVersion(name, self._folders.path(name), partial(self._folders.unwritten, name))

    async def unload(self, record: CheckpointRecord) -> None:
        """Take a checkpoint's weights from its sampler; waits for samples of it that run."""
        if record.kind == "sampler_weights" and record.base_model in self._base_models.names():
            await self._base_models.get(record.base_model).engines.sampler.remove_version(self.named(record))

    async def remove_nameless(self, base: ServedModel, name: str) -> None:
        """Take a nameless version from its sampler, and delete it."""
        try:
            await base.engines.sampler.remove_version(self.nameless(name))
        finally:
            await asyncio.to_thread(self._folders.remove, name)
