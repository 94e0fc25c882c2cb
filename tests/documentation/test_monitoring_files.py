"""The Grafana board, the alerts and the scrape configuration of docs/monitoring/ fit what `/metrics` exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from tinker_local.backend.hosting.server_metrics import METRICS

yaml: Any = pytest.importorskip("yaml")  # which transformers brings

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "monitoring"
BOARD: dict[str, Any] = json.loads((FOLDER / "grafana-board.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "tinker-local-alerts.yml").read_text())
SCRAPE: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())

OF_EVERY_SERIES = {"instance", "job"}
"""Labels that Prometheus adds."""


def series() -> dict[str, set[str]]:
    """The labels of each series that `/metrics` may have, by its name."""
    found: dict[str, set[str]] = {}

    def add(family: Any, name: str, labels: set[str]) -> None:
        if family is HistogramMetricFamily:
            found.update({f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels})
        else:
            found[f"{name}_total" if family is CounterMetricFamily else name] = labels

    for metric in METRICS:
        add(metric.family, metric.name, set(metric.labels))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Each query, and the text that is shown with its labels."""
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            shown = rule["annotations"]["summary"]
            yield rule["expr"], re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"{{\1}}", shown)


def problems(expression: str, shown: str) -> list[str]:
    """Names and labels that are not those of series."""
    known, found = series(), []
    names = re.findall(r"\btinker_local_\w+", expression)
    found += [name for name in names if name not in known]
    of_all = OF_EVERY_SERIES.union(*(known.get(name, set()) for name in names))
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        found += [label for label in labels.split(", ") if label not in of_all]
    for selector in re.findall(r"\{([^}]*)\}", expression):
        found += [label for label in re.findall(r"(\w+)\s*[=!]", selector) if label not in of_all]
    found += [label for label in re.findall(r"\{\{(\w+)\}\}", shown) if label not in of_all]
    return found


def test_every_metric_and_label_of_board_and_alerts_is_exported() -> None:
    assert len([*expressions()]) > 30
    assert {expression: found for expression, shown in expressions() if (found := problems(expression, shown))} == {}


@pytest.mark.parametrize(
    ("expression", "shown", "wrong"),
    [
        ("rate(tinker_local_samples[1m])", "", "tinker_local_samples"),
        ('tinker_local_requests_running{kind="trainer"}', "", "kind"),
        ("sum by (owner) (tinker_local_adapters)", "", "owner"),
        ("tinker_local_adapters", "{{owner}}", "owner"),
    ],
)
def test_a_wrong_name_or_label_would_be_found(expression: str, shown: str, wrong: str) -> None:
    assert problems(expression, shown) == [wrong]


def test_the_board_leaves_out_no_model_metric_of_which_an_operator_would_ask() -> None:
    text = json.dumps(BOARD)
    wanted = ("kv_cache_used_ratio", "replica_kv_cache_used_ratio", "gpu_memory_used_bytes", "owner_tokens_total")
    assert [name for name in wanted if f"tinker_local_{name}" not in text] == []


def test_panels_have_numbers_of_their_own_and_do_not_overlap_and_ask_the_chosen_source() -> None:
    everything = BOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    cells: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & mine, panel["title"]
        cells |= mine
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"]), panel["title"]


def test_the_scrape_example_sends_the_key_as_the_server_reads_it_and_names_the_alerts() -> None:
    (job,) = SCRAPE["scrape_configs"]
    assert list(job["http_headers"]) == ["X-API-Key"]
    assert job["job_name"] == "tinker-local"
    assert 'job="tinker-local"' in ALERTS["groups"][0]["rules"][0]["expr"]
    assert [FOLDER / name for name in SCRAPE["rule_files"]] == [FOLDER / "tinker-local-alerts.yml"]
