"""`tinker-local status`: the runs of a server, how far they are, and how busy it is."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click
from tinker_local.backend.cli.server_client import open_client, refusal, server_options, unreachable

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

GIB = 2**30
SECONDS = 2.0
"""Between two looks."""


def fetch(http: "httpx.Client") -> dict[str, Any]:
    """What the server says of itself; click.ClickException if it does not."""
    import httpx

    try:
        answer = http.get("/api/v1/status")
    except httpx.HTTPError as error:
        raise click.ClickException(unreachable(http, error)) from None
    if answer.status_code != 200:
        raise click.ClickException(refusal(answer))
    found: dict[str, Any] = answer.json()
    return found


def shown(now: dict[str, Any], before: dict[str, Any] | None) -> "RenderableType":
    """Tables of what `fetch` gave, with rates since `before`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    runs = Table(title=f"runs: {len(now['runs'])}", title_justify="left", box=SIMPLE_HEAD)
    runs.add_column("run", no_wrap=True)  # to be copied
    owners = {run["owner"] for run in now["runs"]}
    for column in ("model", "owner") if len(owners) > 1 else ("model",):
        runs.add_column(column, no_wrap=True, min_width=8)
    for column in ("rank", "steps", "unsaved", "tokens", "loss", "norm", "rate", "last", "queue"):
        runs.add_column(column, justify="right", no_wrap=True)
    for run in now["runs"]:
        last = run["last"] or {}
        ago = f"{max(0, now['time'] - last['time']):.0f} s" if last else ""
        counts = [f"{run[name]:,}" for name in ("lora_rank", "steps", "unsaved_steps", "tokens")]
        numbers = [_number(last.get(name)) for name in ("loss", "gradient_norm", "learning_rate")]
        named = [escape(str(run[name])) for name in ("training_run_id", "base_model", "owner")][
            : 3 if len(owners) > 1 else 2
        ]
        runs.add_row(*named, *counts, *numbers, ago, str(run["queued"]))
    parts: list[Any] = [runs]
    if "seconds_up" in now:
        models = Table(title="models", title_justify="left", box=SIMPLE_HEAD)
        models.add_column("model", overflow="fold")
        for column in ("training", "sampling", "KV cache", "trained/s", "sampled/s", "steps", "versions"):
            models.add_column(column, justify="right")
        for at, model in enumerate(now["models"]):
            old = before["models"][at] if before is not None and len(before["models"]) > at else None
            rates = [_rate(now, before, model, old, name) for name in ("trained_tokens", "sampled_tokens")]
            models.add_row(
                escape(", ".join(model["names"])),
                _work(model, "commands", "trainer_works"),
                _work(model, "samples", "sampler_works"),
                f"{model['kv_cache_used']:.0%}",
                *rates,
                f"{model['optimizer_steps']:,}",
                str(model["sampler_versions"]),
            )
        parts.append(models)
        words = [f"up {now['seconds_up'] / 3600:.1f} h", f"memory {now['memory_bytes'] / GIB:.1f} GiB"]
        words += [f"GPU {g['gpu']} {g['used_bytes'] / GIB:.1f} of {g['bytes'] / GIB:.1f} GiB" for g in now["gpus"]]
        parts.append(", ".join(words))
    else:
        parts.append("models: " + escape(", ".join(name for model in now["models"] for name in model["names"])))
    parts += [f"[red]{escape(problem)}[/red]" for problem in now["problems"]]
    return Group(*parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _work(model: dict[str, Any], kind: str, works: str) -> str:
    if not model[works]:
        return "starts again"
    return f"{model[f'{kind}_running']} + {model[f'{kind}_waiting']} waiting"


def _rate(
    now: dict[str, Any], before: dict[str, Any] | None, model: dict[str, Any], old: dict[str, Any] | None, name: str
) -> str:
    if before is None or old is None or now["time"] <= before["time"] or old["names"] != model["names"]:
        return ""
    return f"{max(0, model[name] - old[name]) / (now['time'] - before['time']):,.0f}"


@click.command()
@server_options
@click.option("--once", is_flag=True, help="Print once and end, as without a terminal.")
def status(url: str, api_key: str, once: bool) -> None:
    """Show the training runs of a server and how busy it is, again every two seconds until Ctrl-C.

    Of each run: its optimizer steps and those that no checkpoint has, the tokens trained on, loss and gradient norm of
    the last step, its learning rate, how long ago it was, and the requests that wait.
    """
    from rich.console import Console
    from rich.live import Live

    with open_client(url, {"X-API-Key": api_key}, read_seconds=30) as http:
        before = None
        now = fetch(http)
        console = Console(highlight=False, emoji=False)  # else `:train:` of a run's id becomes a tram
        if once or not sys.stdout.isatty():
            console.print(shown(now, None))
            return
        try:
            with Live(shown(now, None), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(SECONDS)
                    before, now = now, fetch(http)
                    live.update(shown(now, before), refresh=True)
        except KeyboardInterrupt:
            return
