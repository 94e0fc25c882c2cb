"""`backend=` with the real `InProcessBackend` and its real HTTP app; only the engines are fakes."""

import threading
from pathlib import Path
from typing import Any

import tinker_local.client as tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import load_fake


def test_a_backend_of_fake_engines_trains_and_samples_in_this_process(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    backend = InProcessBackend([ModelSource("fake", "fake")], BackendOptions(data_dir=tmp_path), load=load_fake)
    with tinker.ServiceClient(backend=backend) as service:
        trainer = service.create_lora_training_client(base_model="fake", rank=4).result()
        loss_inputs: Any = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=loss_inputs)
        output = trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        again = trainer.forward_backward([datum], "cross_entropy").result()
        assert again.metrics["loss:sum"] < output.metrics["loss:sum"]
        sampler = trainer.save_weights_and_get_sampling_client()
        params = tinker.SamplingParams(max_tokens=3, temperature=0.0)
        sampled = sampler.sample(tinker.model_input([5]), num_samples=2, sampling_params=params).result()
        assert len(sampled.sequences) == 2
        assert "tinker-local" in {thread.name for thread in threading.enumerate()}
    assert not backend.ready
    assert "tinker-local" not in {thread.name for thread in set(threading.enumerate()) - before}
