"""`tinker-local status`: the runs of a server, how far they are, and how busy it is."""

import sys
import time
from typing import TYPE_CHECKING, Any

import click
from tinker_local.backend.cli.server_client import open_client, refusal, server_options, unreachable
from tinker_local.backend.stages import Stage, in_words

if TYPE_CHECKING:
    import httpx
    from rich.console import RenderableType

GIB = 2**30
SECONDS = 2.0
"""Between two looks."""


def fetch(http: "httpx.Client", method: str = "GET", path: str = "status") -> dict[str, Any]:
    """What the server says of itself; click.ClickException if it does not."""
    import httpx

    try:
        answer = http.request(method, f"/api/v1/{path}")
    except httpx.HTTPError as error:
        raise click.ClickException(unreachable(http, error)) from None
    if answer.status_code != 200:
        raise click.ClickException(refusal(answer))
    found: dict[str, Any] = answer.json()
    return found


def shown(now: dict[str, Any], before: dict[str, Any] | None, width: int) -> "RenderableType":
    """What `fetch` gave, with rates since `before`, for a terminal of `width` columns."""
    from rich.console import Group
    from rich.text import Text

    wide = WIDE + (FOR_KL if any(_all_tokens(run) for run in now["runs"]) else 0)
    parts: list[Any] = [_table(now) if width >= wide and now["runs"] else _lines(now)]
    if "seconds_up" in now:
        for at, model in enumerate(now["models"]):
            old = before["models"][at] if before is not None and len(before["models"]) > at else None
            parts.append(Text(_model(now, before, model, old)))
        notes = [_caches(now), *(_start(model) for model in now["models"])]
        parts += [Text(note) for note in notes if note]
        words = [f"up {now['seconds_up'] / 3600:.1f} h", f"memory {now['memory_bytes'] / GIB:.1f} GiB"]
        words += [f"GPU {g['gpu']} {g['used_bytes'] / GIB:.1f} of {g['bytes'] / GIB:.1f} GiB" for g in now["gpus"]]
        parts.append(Text(", ".join(words)))
    else:
        parts.append(Text("models: " + ", ".join(name for model in now["models"] for name in model["names"])))
    parts += [Text(problem, style="red") for problem in now["problems"]]
    return Group(*parts)


WIDE = 130
"""Columns of a terminal in which a row of the table fits."""

FOR_KL = 10
"""Columns more for the distance of the sampler, which runs on sampled tokens have."""


def _table(now: dict[str, Any]) -> "RenderableType":
    """The runs, a row each."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    runs = Table(title=f"runs: {len(now['runs'])}", title_justify="left", box=SIMPLE_HEAD)
    runs.add_column("run", no_wrap=True)  # to be copied
    named = ("base_model", "owner") if _several_owners(now) else ("base_model",)
    for column in named:
        runs.add_column(column.replace("base_", ""), no_wrap=True, min_width=8)
    apart = ["KL"] if any(_all_tokens(run) for run in now["runs"]) else []
    for column in ("rank", "steps", "unsaved", "tokens", "loss", "norm", "rate", *apart, "last", "queue"):
        runs.add_column(column, justify="right", no_wrap=True)
    for run in now["runs"]:
        last = run["last"] or {}
        counts = [f"{run[name]:,}" for name in ("lora_rank", "steps", "unsaved_steps", "tokens")]
        numbers = [_number(last.get(name)) for name in ("loss", "gradient_norm", "learning_rate")]
        numbers += [_number(_all_tokens(run).get("kl")) for _ in apart]
        names = [escape(str(run[name])) for name in ("training_run_id", *named)]
        runs.add_row(*names, *counts, *numbers, _ago(now, last), str(run["queued"]))
    return runs


def _lines(now: dict[str, Any]) -> "RenderableType":
    """The runs, two lines each; the first alone is wrapped nowhere, so that the run can be copied."""
    from rich.text import Text

    if not now["runs"]:
        return Text("no run is live")
    text = Text()
    for run in now["runs"]:
        last = run["last"] or {}
        text.append(f"{run['training_run_id']}", style="bold")
        owner = f", {run['owner']}" if _several_owners(now) else ""
        text.append(f"  {run['base_model']}, rank {run['lora_rank']}{owner}\n")
        facts = [f"{_steps(run['steps'])} ({run['unsaved_steps']:,} unsaved)", f"{run['tokens']:,} tokens"]
        for words, name in (("loss", "loss"), ("norm", "gradient_norm"), ("rate", "learning_rate")):
            if last.get(name) is not None:
                facts.append(f"{words} {_number(last[name])}")
        if found := _all_tokens(run):
            facts.append(f"KL {_number(found['kl'])} (ratios up to {_number(found['largest_ratio'])})")
        facts += [f"{_ago(now, last)} ago"] if last else []
        facts += [f"{run['queued']} queued"] if run["queued"] else []
        text.append(f"  {', '.join(facts)}\n")
    text.rstrip()
    return text


def _all_tokens(run: dict[str, Any]) -> dict[str, float]:
    """How far the sampler of a run is from its trainer, over all sampled tokens of the last step; empty without any."""
    mismatch: dict[str, dict[str, float]] = (run["last"] or {}).get("mismatch") or {}
    return mismatch.get("all", {})


def _several_owners(now: dict[str, Any]) -> bool:
    return len({run["owner"] for run in now["runs"]}) > 1


def _ago(now: dict[str, Any], last: dict[str, Any]) -> str:
    """How long ago the last step was; empty before the first."""
    return f"{max(0, now['time'] - last['time']):.0f} s" if last else ""


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _model(
    now: dict[str, Any], before: dict[str, Any] | None, model: dict[str, Any], old: dict[str, Any] | None
) -> str:
    """A line on a base model, with its rates since `before`, when it was `old`."""
    parts = [f"training {_work(model, 'commands', 'trainer_works')}"]
    parts.append(f"sampling {_work(model, 'samples', 'sampler_works')}")
    parts.append("the sampler sleeps" if model["sampler_asleep"] else f"KV cache {model['kv_cache_used']:.0%}")
    if before is not None and old is not None and old["names"] == model["names"] and now["time"] > before["time"]:
        for name in ("trained", "sampled"):
            count = max(0, model[f"{name}_tokens"] - old[f"{name}_tokens"])
            parts.append(f"{count / (now['time'] - before['time']):,.0f} {name} tokens/s")
    versions = model["sampler_versions"]
    parts += [_steps(model["optimizer_steps"]), f"{versions} sampler version{'' if versions == 1 else 's'}"]
    return f"{', '.join(model['names'])}: {', '.join(parts)}"


def _caches(now: dict[str, Any]) -> str:
    """What of the memory of GPUs in use is cache; empty if that is not known."""
    kv_cache, cached = (sum(model.get(name, 0) for model in now["models"]) for name in _CACHES)
    told = [f"{kv_cache / GIB:.1f} GiB of each GPU are KV cache"] if kv_cache else []
    told += [f"the trainers hold {cached / GIB:.1f} GiB for later use"] if cached else []
    return "; ".join(told) if now["gpus"] else ""


_CACHES = ("kv_cache_bytes", "trainer_cached_bytes")


def _start(model: dict[str, Any]) -> str:
    """Where the time of a model's start went, by part; empty if all was quick."""
    parts = []
    for part, stages in model.get("start", {}).items():
        if words := in_words([Stage(name, seconds) for name, seconds in stages.items()]):
            parts.append(f"{part}: {words}")
    return f"{model['names'][0]} started with {'; '.join(parts)}" if parts else ""


def _weights(check: dict[str, Any]) -> str:
    if check["problem"]:
        return str(check["problem"])
    if not check["matrices"]:
        return "frozen weights: trainer and sampler have a copy each, and are compared at a start alone"
    return f"frozen weights: {check['matrices']} shared matrices are what was written ({check['seconds']:.1f} s)"


def _work(model: dict[str, Any], kind: str, works: str) -> str:
    """As the console says it."""
    if not model[works]:
        return "starts again"
    running, waiting = model[f"{kind}_running"], model[f"{kind}_waiting"]
    if not running and not waiting:
        return "idle"
    return f"{running} running" + (f" and {waiting} waiting" if waiting else "")


@click.command()
@server_options
@click.option("--once", is_flag=True, help="Print once and end, as without a terminal.")
@click.option(
    "--check-weights",
    is_flag=True,
    help="Compute the checksums of the frozen weights that trainer and sampler share, and say what they are.",
)
def status(url: str, api_key: str, once: bool, check_weights: bool) -> None:
    """Show the training runs of a server and how busy it is, again every two seconds until Ctrl-C.

    Of each run: its optimizer steps and those that no checkpoint has, the tokens trained on, loss and gradient norm of
    the last step, its learning rate, how long ago it was, and the requests that wait. Of a run that trains on sampled
    tokens also KL(sampler, trainer) in nats per token.
    """
    from rich.console import Console
    from rich.live import Live

    # A check waits for the step that runs.
    with open_client(url, {"X-API-Key": api_key}, read_seconds=600 if check_weights else 30) as http:
        if check_weights:
            checks = fetch(http, "POST", "check_weights")["weights"]
            for check in checks:
                click.echo(_weights(check))
            sys.exit(any(check["problem"] for check in checks))
        before, now = None, fetch(http)
        console = Console(highlight=False, emoji=False)  # else `:train:` of a run's id becomes a tram
        if once or not sys.stdout.isatty():
            console.print(shown(now, None, console.width))
            return
        try:
            with Live(shown(now, None, console.width), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(SECONDS)
                    before, now = now, fetch(http)
                    live.update(shown(now, before, console.width), refresh=True)
        except KeyboardInterrupt:
            return
