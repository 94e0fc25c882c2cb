"""Durable state: metadata in a database, adapters in checkpoint folders, ephemeral versions in shared memory."""

from tinker_local.backend.storage.data_folder import FolderInUseError as FolderInUseError
from tinker_local.backend.storage.names import parse_tinker_path as parse_tinker_path
from tinker_local.backend.storage.store import Store as Store
from tinker_local.backend.storage.versions import VersionFolders as VersionFolders
