"""The content of a version of an adapter, for samplers that cannot read its folder."""

from safetensors import SafetensorError
from tinker_local.backend.adapters.adapter import AdapterState, AdapterVersion
from tinker_local.backend.adapters.adapter_files import CONFIG, WEIGHTS, read_captured
from tinker_local.backend.adapters.checksums import check_files
from tinker_local.types import InvalidRequestError, NotFoundError


def version_content(version: AdapterVersion) -> AdapterState:
    """The content of `version`, from memory or this host's disk. NotFoundError if its folder is gone,
    InvalidRequestError if its files cannot be read."""
    state = version.unwritten()
    if state is not None:
        return state
    where = f"sampler version {version.name}"
    try:
        if not version.just_written:
            check_files(version.path, (CONFIG, WEIGHTS), where)
        return read_captured(version.path)
    except FileNotFoundError:
        raise NotFoundError(f"{where}: its folder {version.path} is gone") from None
    except (InvalidRequestError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if not version.path.is_dir():  # it was removed while it was read
            raise NotFoundError(f"{where}: its folder {version.path} is gone") from None
        if isinstance(error, InvalidRequestError):
            raise
        # As a sampler on this host says it.
        raise InvalidRequestError(f"{where}: its files in {version.path} cannot be read: {error!r}") from error
