"""Checkpoints as files for other programs, and back."""

from tinker_local.backend.exporting.export import Exported as Exported
from tinker_local.backend.exporting.export import export_checkpoint as export_checkpoint
from tinker_local.backend.exporting.import_adapter import ImportedAdapter as ImportedAdapter
from tinker_local.backend.exporting.import_adapter import import_adapter as import_adapter
