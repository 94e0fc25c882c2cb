"""stable_reinforce through the official SDK: what is recorded of samples, and which data that name them are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.control.recorded_samples import RecordedSamples
from tinker_local.backend.control.session_records import LIFETIME
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.backend.training.losses import loss_of
from tinker_local.types import InvalidRequestError, SampledSequence

from tests.training.loss_reference import reference

BASE = "fake/bigram"
PROMPT = [5, 9, 20, 7]
Sampled = tinker.SampledProvenanceSpan
Prompt = tinker.PromptProvenanceSpan


def serve(tmp_path: Path, **options: Any) -> LoopbackServer:
    backend = InProcessBackend([ModelSource(BASE, BASE)], BackendOptions(data_dir=tmp_path, **options), load=load_fake)
    return LoopbackServer(backend)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackServer]:
    server = serve(tmp_path_factory.mktemp("data"))
    yield server
    server.close()


@pytest.fixture
def service(server: Any) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture
def client(service: Any) -> Any:
    return service.create_lora_training_client(base_model=BASE, rank=2, seed=1)


def sample(client: Any, count: int = 2, *, record: bool = True) -> list[Any]:
    sampler = client.save_weights_and_get_sampling_client(record_stability_info=record)
    params = tinker.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
    return list(sampler.sample(tinker.ModelInput.from_ints(PROMPT), count, params).result().sequences)


def datum(sequence: Any, advantage: float = 1.0, **changed: Any) -> tinker.Datum:
    """As the cookbook makes one of a single turn."""
    tokens = sequence.tokens_np.tolist()
    before, sampled = len(PROMPT) - 1, len(tokens)
    name = sequence.sequence_id
    fields: dict[str, Any] = {
        "model_input_spans": [
            Prompt(sequence_id=name, length=before + 1),
            Sampled(sequence_id=name, length=sampled - 1),
        ],
        "loss_fn_input_spans": [
            Prompt(sequence_id=name, offset=1, length=before),
            Sampled(sequence_id=name, length=sampled),
        ],
    }
    inputs = {
        "target_tokens": np.array([*PROMPT[1:], *tokens]),
        "logprobs": np.array([0.0] * before + list(sequence.logprobs_np), np.float32),
        "advantages": np.array([0.0] * before + [advantage] * sampled, np.float32),
    }
    for key in [key for key in changed if key in inputs]:
        inputs[key] = changed.pop(key)
    if changed.pop("without_logprobs", False):
        del inputs["logprobs"]
    model_input = tinker.ModelInput.from_ints([*PROMPT, *tokens[:-1]])
    return tinker.Datum(model_input=model_input, loss_fn_inputs=inputs, **{**fields, **changed})


def refused(client: Any, data: list[tinker.Datum], match: str) -> None:
    with pytest.raises(tinker.RequestFailedError, match=match) as failed:
        client.forward_backward(data, "stable_reinforce").result(timeout=60)
    assert failed.value.category is tinker.types.RequestErrorCategory.User


def test_it_trains_on_what_was_recorded_and_says_that_the_definition_is_local_on_fakes(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = [datum(sequence, advantage) for sequence, advantage in zip(sample(client), (1.0, -1.0), strict=True)]
    off_policy = tinker.AdamParams(learning_rate=0.05)
    client.forward_backward(data, "stable_reinforce").result()
    client.optim_step(off_policy).result()
    config = {"kl_coeff": 0.2}
    output = client.forward_backward(data, "stable_reinforce", config).result()
    wanted = 0.0
    for given, found in zip(data, output.loss_fn_outputs, strict=True):
        inputs = {name: tensor.to_numpy().astype(float) for name, tensor in given.loss_fn_inputs.items()}
        inputs["sampled"] = (np.arange(len(inputs["logprobs"])) >= len(PROMPT) - 1).astype(float)
        settings = loss_of("stable_reinforce").complete_settings(config)
        wanted += reference("stable_reinforce", found["logprobs"].to_numpy().astype(float), inputs, settings)
    assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4)
    assert output.metrics["local_definition:mean"] == 1.0
    assert sum("stable_reinforce is trained by this project's definition" in line for line in caplog.messages) == 1
    assert client.optim_step(off_policy).result().metrics["grad_norm"] > 0


def test_logprobs_need_not_be_sent_and_forward_works_on_fakes(client: Any) -> None:
    (sequence,) = sample(client, 1)
    sent, recorded = (
        client.forward([datum(sequence, without_logprobs=leave_out)], "stable_reinforce").result().metrics["loss:sum"]
        for leave_out in (False, True)
    )
    assert sent == recorded


def test_data_that_do_not_fit_their_records_are_refused_with_the_numbers_on_fakes(client: Any) -> None:
    first, second = sample(client)
    tokens = first.tokens_np.tolist()
    good, before = datum(first), len(PROMPT) - 1
    targets = np.array([*PROMPT[1:], *tokens])
    wrong_targets = targets.copy()
    wrong_targets[before + 2] = (tokens[2] + 1) % 500
    other = [
        Prompt(sequence_id=first.sequence_id, offset=1, length=before),
        Sampled(sequence_id=second.sequence_id, length=6),
    ]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_input_spans": None, "loss_fn_input_spans": None}, r"data\[0\]: has no provenance spans"),
        (
            {"target_tokens": wrong_targets},
            rf"loss_fn_input_spans\[1\]: token {wrong_targets[before + 2]} at position 5",
        ),
        (
            {"loss_fn_input_spans": other},
            r"loss_fn_input_spans\[1\]: token \d+ at position \d+, but .* has \d+ as sampled",
        ),
        (
            {"loss_fn_input_spans": [Sampled(sequence_id=first.sequence_id, offset=1, length=before + 6)]},
            "positions 1 to 10 of the sampled part of .*, which has 6",
        ),
        (
            {"loss_fn_input_spans": [Prompt(sequence_id=first.sequence_id, length=before + 6)]},
            "positions 0 to 9 of the prompt part of .*, which has 4",
        ),
        ({"advantages": np.ones(before + 6, np.float32)}, "advantages: 1 at position 0, whose target was not sampled"),
        (
            {"logprobs": np.full(before + 6, -9.0, np.float32)},
            r"logprobs: -9 at position 3, but -\d.* was recorded",
        ),
    ]
    for changed, match in cases:
        refused(client, [datum(first, **changed)], match)
        with pytest.raises(tinker.RequestFailedError):  # a step after a gradient that failed
            client.optim_step(tinker.AdamParams()).result(timeout=60)
    (unrecorded,) = sample(client, 1, record=False)
    refused(client, [datum(unrecorded)], "is not recorded in this run's session.*: sample again")
    client.forward([good], "stable_reinforce").result(timeout=60)


@pytest.mark.mutation(
    "records-for-everybody",
    "SessionRecords.known",
    "records = self._sessions.get(session_id)",
    "records = next(iter(self._sessions.values()), None)",
)
def test_records_belong_to_the_session_that_sampled_on_fakes(server: Any, client: Any) -> None:
    (sequence,) = sample(client, 1)
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as another:
        stranger = another.create_lora_training_client(base_model=BASE, rank=2)
        refused(stranger, [datum(sequence)], "is not recorded in this run's session")
    client.forward([datum(sequence)], "stable_reinforce").result(timeout=60)


def test_strict_losses_refuse_it_and_its_records_on_fakes(tmp_path: Path) -> None:
    server = serve(tmp_path, strict_losses=True)
    try:
        with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as service:
            client = service.create_lora_training_client(base_model=BASE, rank=2)
            with pytest.raises(tinker.BadRequestError, match="strict-losses"):
                sample(client, 1)
            (sequence,) = sample(client, 1, record=False)
            refused(client, [datum(sequence)], "refused by this server .--strict-losses.*importance_sampling")
    finally:
        server.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(name: str, tokens: int = 4) -> SampledSequence:
    return SampledSequence(
        stop_reason="length",
        tokens=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        sequence_id=name,
    )


@pytest.fixture
def found() -> Callable[[RecordedSamples, str], bool]:
    def find(records: RecordedSamples, name: str) -> bool:
        try:
            records.find("s", name)
        except InvalidRequestError:
            return False
        return True

    return find


def test_a_record_lives_for_a_day_from_its_last_use(found: Any) -> None:
    clock = Clock()
    records = RecordedSamples(clock)
    records.add("s", [drawn("a"), drawn("b")], 3)
    clock.now = 0.75 * LIFETIME
    assert found(records, "a")
    clock.now = 1.5 * LIFETIME
    assert found(records, "a")
    assert not found(records, "b")
    records.add("s", [drawn("c")], 3)
    clock.now = 4 * LIFETIME
    records.add("t", [drawn("d")], 3)
    one = records.bytes
    records.end_session("t")
    assert records.bytes == 0
    assert one > 0


def test_records_are_bounded_in_bytes_and_the_least_recently_used_go_first(found: Any) -> None:
    one = RecordedSamples()
    one.add("s", [drawn("a")], 3)
    size = one.bytes
    records = RecordedSamples(session_bytes=3 * size, all_bytes=4 * size)
    records.add("s", [drawn("a"), drawn("b"), drawn("c")], 3)
    assert found(records, "a")
    records.add("s", [drawn("d")], 3)
    assert [found(records, name) for name in "abcd"] == [True, False, True, True]
    records.add("t", [drawn("e"), drawn("f")], 3)
    assert records.bytes == 4 * size


def test_a_sequence_that_is_recorded_again_takes_the_place_of_the_first_on_fakes(found: Any) -> None:
    """As many bytes are counted as there are: otherwise every later sample of the session would fail."""
    one = RecordedSamples()
    one.add("s", [drawn("a")], 3)
    size = one.bytes
    records = RecordedSamples(session_bytes=3 * size)
    for _ in range(5):
        records.add("s", [drawn("a", 3), drawn("b")], 3)
        records.add("s", [drawn("a")], 3)
    assert records.bytes == 2 * size
    assert len(records.find("s", "a").tokens) == 4
    assert found(records, "b")
