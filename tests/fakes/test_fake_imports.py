"""The fakes run without the heavy libraries."""

import subprocess
import sys


def test_fakes_load_neither_torch_nor_transformers_nor_vllm() -> None:
    code = (
        "import sys, tinker_local.backend.fakes\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_fakes_train_and_step_without_torch() -> None:
    """Losses and optimizers are the trainer's; their formulas run on NumPy."""
    code = (
        "import sys, numpy as np\n"
        "from tinker_local.backend.fakes import FakeModel, FakeTrainer\n"
        "from tinker_local.backend.rendering.rendered_input import RenderedInput\n"
        "from tinker_local.backend.training.trainer import TrainDatum, TrainWork\n"
        "from tinker_local.backend.training.losses import LOSSES\n"
        "from tinker_local.types import AdamParams, LoraConfig\n"
        "trainer, ids = FakeTrainer(FakeModel()), np.arange(8)\n"
        "trainer.create_adapter('a', LoraConfig(rank=2))\n"
        "for loss in LOSSES.values():\n"
        "    inputs = {name: np.ones(8, np.float32) for name in loss.inputs}\n"
        "    datum = TrainDatum(RenderedInput(ids.astype(np.int32)), ids, inputs)\n"
        "    [result] = trainer.forward_backward([TrainWork('a', [datum], loss.name)])\n"
        "    assert result.metrics['loss:sum'], result\n"
        "    trainer.optim_step('a', AdamParams())\n"
        "trainer.capture('a', optimizer=True)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
