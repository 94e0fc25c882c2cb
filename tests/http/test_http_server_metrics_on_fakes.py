"""`GET /metrics`, of operations, owners, live runs, memory and disk."""

from prometheus_client.parser import text_string_to_metric_families
from tinker_local.backend.scheduling.operation_totals import BOUNDS, Histogram

from tests.http.conftest import Api, StartApi

Values = dict[tuple[str, ...], float]


async def read(api: Api) -> dict[str, Values]:
    answer = await api.http.get("/metrics")
    assert answer.status_code == 200
    found: dict[str, Values] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if "model" not in sample.labels or "token_seconds" in sample.name:
                name = sample.name.removeprefix("tinker_local_")
                found.setdefault(name, {})[tuple(sample.labels.values())] = sample.value  # in the order of their names
    return found


async def test_operations_and_tokens_are_counted_by_kind_and_owner_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    before = await read(api)
    assert "operation_seconds_count" not in before
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.gradient(model, 2, forward_only=True))
    await api.result(await api.step(model, 3, learning_rate=0.25))
    await api.failure(await api.gradient(model, 4, loss_fn="nonsense"))
    sampler = await api.base_sampler()
    sampled = await api.result(await api.sample(sampler, 0, [5, 9, 20], num_samples=3))
    found = await read(api)
    assert found["owner_operations_total"] == {
        ("create_model", "local"): 1,
        ("forward_backward", "local"): 2,
        ("forward", "local"): 1,
        ("optim_step", "local"): 1,
        ("sample", "local"): 1,
    }
    tokens = sum(len(sequence.tokens) for sequence in sampled.sequences)
    assert found["owner_tokens_total"] == {
        ("trained", "local"): 3,
        ("prompt", "local"): 3,
        ("sampled", "local"): tokens,
    }
    assert found["operation_seconds_count"][("forward_backward",)] == 1  # the one that succeeded
    assert found["operation_seconds_bucket"][("forward_backward", "+Inf")] == 1
    assert found["time_to_first_token_seconds_count"] == {("fake/bigram",): 1}
    assert found["time_per_output_token_seconds_count"] == {("fake/bigram",): 1}
    first, whole = found["time_to_first_token_seconds_sum"][("fake/bigram",)], found["operation_seconds_sum"]
    assert 0 < first <= whole[("sample",)]
    assert 0 < found["operation_waiting_seconds_sum"][("sample",)] <= found["operation_seconds_sum"][("sample",)] < 60


async def test_live_runs_memory_disk_and_versions_are_told_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    await api.result(await api.gradient(model, 1))
    await api.result(await api.step(model, 2, learning_rate=0.25))
    found, run = await read(api), ("local", model)
    assert [found[f"run_{name}"][run] for name in ("steps", "tokens", "learning_rate")] == [1, 3, 0.25]
    last = api.backend.runs.all_live()[0].progress.last
    assert last is not None
    assert (found["run_loss"][run], found["run_gradient_norm"][run]) == (last.loss, last.gradient_norm)
    assert found["memory_bytes"][()] > 2**20
    assert 0 < found["disk_free_bytes"][()] < found["disk_bytes"][()]
    ((labels, value),) = found["build_info"].items()
    assert value == 1
    assert "0.1.0" in labels
    await api.backend.sessions.finish(model.partition(":")[0])
    assert "run_steps" not in await read(api)


def test_a_histogram_counts_what_is_not_above_each_bound_on_fakes() -> None:
    histogram = Histogram()
    for value in (0.0, 0.01, 0.02, 5.0, 1e6):
        histogram.add(value)
    found = dict(histogram.cumulated())
    assert len(found) == len(BOUNDS) + 1
    assert [found[bound] for bound in ("0.01", "0.03", "3.0", "10.0", "300.0", "+Inf")] == [2, 3, 3, 4, 4, 5]
