"""What serves a base model: the real engines (vLLM and HF transformers), or the fakes."""

import json
from pathlib import Path

from tinker_local.backend.base_models import Engines
from tinker_local.backend.options import BackendOptions, ModelSource


def load_fake(source: ModelSource, options: BackendOptions) -> Engines:
    """The numpy model in place of everything; its name may be any."""
    from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeSampler, FakeTrainer

    model = FakeModel(source.name)
    return Engines(FakeRenderer(model), FakeTrainer(model), FakeSampler(model), arch="fake", tolerance=1e-4)


def check_source(source: ModelSource) -> None:
    """ValueError, before anything is loaded, for a folder that cannot work."""
    folder = Path(source.path)
    if not folder.exists():
        if source.path.startswith((".", "/", "~")) or source.path.count("/") != 1:
            raise ValueError(f"--model {source.name}: there is no folder {source.path}")
        return  # a hub name
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {source.name}: {folder} holds no config.json")
    from tinker_local.backend.training.families import FAMILY_NAMES

    model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    if model_type not in FAMILY_NAMES:
        raise ValueError(
            f"--model {source.name}: model_type {model_type!r} is not supported; "
            f"supported are {', '.join(sorted(FAMILY_NAMES))}"
        )
