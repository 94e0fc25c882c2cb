"""Checkpoints as files for other programs."""

from tinker_local.backend.exporting.export import Exported as Exported
from tinker_local.backend.exporting.export import export_checkpoint as export_checkpoint
