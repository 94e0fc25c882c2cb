"""Where the weights of each sampler version are."""

from functools import partial

from tinker_local.backend.adapters.adapter import AdapterVersion
from tinker_local.backend.models.served_models import ServedModel, ServedModels
from tinker_local.backend.storage.records import CheckpointRecord
from tinker_local.backend.storage.store import Store
from tinker_local.backend.storage.versions import VersionFolders
from tinker_local.backend.threads import DISK


class SamplerVersions:
    """Where the weights of each version are, and how to remove them from the sampler."""

    def __init__(self, store: Store, folders: VersionFolders, models: ServedModels) -> None:
        self._store = store
        self._folders = folders
        self._base_models = models

    @staticmethod
    def name_of(record: CheckpointRecord) -> str:
        """Of a checkpoint's version; one that was saved again under the same name is another version."""
        return f"{record.tinker_path}@{record.created_at.isoformat()}"

    def named(self, record: CheckpointRecord, *, just_written: bool = False) -> AdapterVersion:
        """Of a checkpoint."""
        folder = self._store.checkpoint_folder(record)
        return AdapterVersion(self.name_of(record), folder, just_written=just_written)

    def ephemeral(self, name: str) -> AdapterVersion:
        """The version that was published as `name`; NotFoundError if there is none."""
        return AdapterVersion(name, self._folders.path(name), partial(self._folders.unwritten, name))

    def size(self, name: str) -> int:
        """Bytes of an ephemeral version."""
        return self._folders.size(name)

    async def unload(self, record: CheckpointRecord) -> None:
        """Take a checkpoint's weights from its sampler; waits for samples of it that run."""
        if record.kind == "sampler_weights" and record.base_model in self._base_models.names():
            await self._base_models.get(record.base_model).engines.sampler.remove_version(self.named(record))

    async def remove_ephemeral(self, base: ServedModel, name: str) -> None:
        """Remove an ephemeral version from its sampler and delete it."""
        try:
            await base.engines.sampler.remove_version(self.ephemeral(name))
        finally:
            await DISK.run(self._folders.remove, name)
