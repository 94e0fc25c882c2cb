"""Fakes: a renderer, a trainer and a sampler that implement the interfaces of the real parts with NumPy alone.

All three share one `FakeModel`, a bigram model with LoRA adapters. It is small enough to be exact: gradients are
analytic, trainer and sampler agree to rounding, and it learns. Losses and optimizers are those of the real trainer.
`tinker-local serve --fake` runs on them, without torch.

    model = FakeModel("fake/bigram")
    renderer, trainer, sampler = FakeRenderer(model), FakeTrainer(model), FakeSampler(model)
"""

from tinker_local.backend.fakes.fake_memory import FakeMemory as FakeMemory
from tinker_local.backend.fakes.fake_model import EOS_ID as EOS_ID
from tinker_local.backend.fakes.fake_model import FakeModel as FakeModel
from tinker_local.backend.fakes.fake_model import FakeRenderer as FakeRenderer
from tinker_local.backend.fakes.fake_model import decode as decode
from tinker_local.backend.fakes.fake_model import encode as encode
from tinker_local.backend.fakes.fake_sampler import FakeFollower as FakeFollower
from tinker_local.backend.fakes.fake_sampler import FakeSampler as FakeSampler
from tinker_local.backend.fakes.fake_text import FakeText as FakeText
from tinker_local.backend.fakes.fake_tools import FakeTools as FakeTools
from tinker_local.backend.fakes.fake_trainer import FakeTrainer as FakeTrainer
