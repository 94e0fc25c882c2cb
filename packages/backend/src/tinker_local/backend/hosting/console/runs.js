// The first view: live runs, how busy each base model is, memory, and all recorded runs.

import { get, post } from "./api.js";
import { Table, h, setText, show } from "./dom.js";
import { baseOf, bytes, duration, integer, moment, number, owner } from "./format.js";
import { Pages } from "./pages.js";
import { Poll } from "./polling.js";

const PAGE = 50;
const NAMES_MS = 30000;

export function runLink(id) {
  return h("a", { href: `#${new URLSearchParams({ run: id })}`, class: "id" }, id);
}

/** The display names of sessions, by the session's id, which a run's begins with. */
export class Names {
  constructor() {
    this.of = new Map();
    this.asked = -Infinity;
  }

  name(run) {
    return this.of.get(run.split(":")[0]) ?? "";
  }

  /** Ask for the newest sessions if a run's is unknown, not more often than every NAMES_MS. */
  async learn(runs) {
    const unknown = runs.some((run) => !this.of.has(run.split(":")[0]));
    if (!unknown || performance.now() - this.asked < NAMES_MS) return;
    this.asked = performance.now();
    const found = await post("api/v1/sessions/search", { limit: 200 });
    for (const session of found.sessions) this.of.set(session.session_id, session.display_name ?? "");
    for (const run of runs) if (!this.of.has(run.split(":")[0])) this.of.set(run.split(":")[0], "");
  }
}

/** Waits for the first run of a session, and goes to its page: what `get_console_url` of a client leads to. */
export class SessionView {
  constructor(session, failed) {
    this.title = `Session ${session}`;
    this.node = h("p", { role: "status" }, `Session ${session} has no run yet. Its runs will be shown here.`);
    this.poll = new Poll(
      async () => {
        const found = await get(`api/v1/sessions/${encodeURIComponent(session)}`);
        const runs = new URLSearchParams(found.training_run_ids.map((id) => ["run", id]));
        if (runs.size) location.replace(`#${runs}`);
      },
      2000,
      failed,
    );
  }

  start() {
    this.poll.start();
  }

  stop() {
    this.poll.stop();
  }

  status() {}
}

/** A number of `now` minus that of `before`, for each second between them; null if there is none. */
function rate(now, before, value, old) {
  if (!before || old === undefined || now.time <= before.time || value < old) return null;
  return (value - old) / (now.time - before.time);
}

function work(model, kind, works) {
  if (!model[works]) return "starts again";
  const [running, waiting] = [model[`${kind}_running`], model[`${kind}_waiting`]];
  if (!running && !waiting) return "idle";
  return `${integer(running)} running${waiting ? `, ${integer(waiting)} waiting` : ""}`;
}

export class RunsView {
  title = "Runs";

  constructor(names, failed) {
    this.names = names;
    this.now = null;
    this.before = null;
    this.known = null;
    this.rates = new Map();
    this.chosen = new Set();
    this.compare = h(
      "button",
      { type: "button", disabled: true, on: { click: () => this.open() } },
      "Compare the chosen runs",
    );
    const of = (id) => this.now.runs.find((run) => run.training_run_id === id) ?? {};
    const live = (title, cell) => ({ title, number: true, cell: ({ id }) => cell(of(id)) });
    this.live = new Table(
      "Live runs",
      [
        { title: "Run", cell: ({ id }) => h("span", { class: "chosen" }, this.choice(id), runLink(id)) },
        { title: "Session", cell: ({ id }) => names.name(id) },
        { title: "Owner", cell: ({ id }) => of(id).owner },
        { title: "Base model", cell: ({ id }) => of(id).base_model },
        live("Rank", (run) => integer(run.lora_rank)),
        live("Steps", (run) => integer(run.steps)),
        live("Unsaved", (run) => integer(run.unsaved_steps)),
        live("Tokens", (run) => integer(run.tokens)),
        live("Tokens/s", (run) => integer(this.rates.get(run.training_run_id))),
        live("Loss", (run) => number(run.last?.loss)),
        live("Learning rate", (run) => number(run.last?.learning_rate)),
        live("Last step", (run) => (run.last ? `${duration(this.now.time - run.last.time)} ago` : "")),
        live("Queued", (run) => integer(run.queued)),
      ],
      { key: ({ id }) => id, empty: "No run is live." },
    );
    const of_model = (name) => this.now.models.find((model) => model.names[0] === name) ?? {};
    const speed = (name, kind) =>
      rate(
        this.now,
        this.before,
        of_model(name)[kind],
        this.before?.models.find((model) => model.names[0] === name)?.[kind],
      );
    const busy = (title, cell, isNumber = true) => ({ title, number: isNumber, cell: ({ id }) => cell(of_model(id), id) });
    this.models = new Table(
      "Base models",
      [
        { title: "Base model", cell: ({ id }) => of_model(id).names.join(", ") },
        busy("Training queue", (model) => work(model, "commands", "trainer_works"), false),
        busy("Sampling queue", (model) => work(model, "samples", "sampler_works"), false),
        busy("Sequences", (model) => integer(model.sequences)),
        busy("KV cache", (model) => `${integer(100 * model.kv_cache_used)} %`),
        busy("Trained tokens/s", (_, id) => integer(speed(id, "trained_tokens"))),
        busy("Sampled tokens/s", (_, id) => integer(speed(id, "sampled_tokens"))),
        busy("Steps", (model) => integer(model.optimizer_steps)),
        busy("Samples", (model) => integer(model.samples)),
        busy("Adapters", (model) => integer(model.adapters)),
        busy("Sampler versions", (model) => integer(model.sampler_versions)),
        busy("Sampler", (model) => (model.sampler_asleep ? "asleep" : "awake"), false),
      ],
      { key: ({ id }) => id, empty: "" },
    );
    this.names_only = h("p");
    this.memory = h("div", { class: "meters" });
    this.memory_section = h("section", {}, h("h2", {}, "Memory"), this.memory);
    this.recorded = new Table(
      "All recorded runs",
      [
        { title: "Run", cell: (run) => runLink(run.training_run_id) },
        { title: "Session", cell: (run) => names.name(run.training_run_id) },
        { title: "Owner", cell: (run) => owner(run.model_owner) },
        { title: "Base model", cell: baseOf },
        { title: "Rank", number: true, cell: (run) => integer(run.lora_rank) },
        { title: "Last request", cell: (run) => moment(run.last_request_time) },
        { title: "Last checkpoint", cell: (run) => run.last_checkpoint?.checkpoint_id ?? "" },
        { title: "Last sampler version", cell: (run) => run.last_sampler_checkpoint?.checkpoint_id ?? "" },
      ],
      { key: (run) => run.training_run_id, empty: "No run is recorded." },
    );
    this.logs = new Table(
      "Logs of programs",
      [
        { title: "Log", cell: (log) => h("a", { href: `#${new URLSearchParams({ log: log.log_id })}` }, log.name) },
        { title: "Run", cell: (log) => (log.training_run_id ? runLink(log.training_run_id) : "") },
        { title: "Size", number: true, cell: (log) => bytes(log.size_bytes) },
        { title: "Changed", cell: (log) => moment(log.time) },
      ],
      { key: (log) => `${log.log_id} ${log.training_run_id}`, empty: "There is no metrics.jsonl below the watched folder." },
    );
    this.logs_section = h("section", { hidden: true }, h("h2", {}, "Logs of programs"), this.logs.whole);
    this.pages = new Pages(PAGE, () => this.poll.now());
    this.poll = new Poll(() => this.list(), 10000, failed);
    this.node = h(
      "div",
      {},
      h("section", {}, h("div", { class: "head" }, h("h2", {}, "Live runs"), this.compare), this.live.whole),
      h("section", {}, h("h2", {}, "Base models"), this.models.whole, this.names_only),
      this.memory_section,
      h("section", {}, h("div", { class: "head" }, h("h2", {}, "All recorded runs"), this.pages.node), this.recorded.whole),
      this.logs_section,
    );
  }

  start() {
    this.poll.start();
  }

  stop() {
    this.poll.stop();
  }

  choice(id) {
    const chosen = (event) => {
      if (event.target.checked) this.chosen.add(id);
      else this.chosen.delete(id);
      this.compare.disabled = this.chosen.size < 2;
    };
    return h("input", { type: "checkbox", "aria-label": `Compare ${id}`, on: { change: chosen } });
  }

  open() {
    location.hash = new URLSearchParams([...this.chosen].map((id) => ["run", id])).toString();
  }

  async list() {
    const found = await get(`api/v1/training_runs?limit=${PAGE}&offset=${this.pages.offset}`);
    await this.names.learn(found.training_runs.map((run) => run.training_run_id));
    this.pages.update(found.cursor.total_count);
    this.recorded.update(found.training_runs);
    const { logs, watches } = this.logs_section.hidden && this.asked ? { watches: false } : await get("api/v1/logs");
    this.asked = true;
    show(this.logs_section, watches);
    if (watches) this.logs.update(logs);
  }

  status(now, before) {
    Object.assign(this, { now, before });
    for (const run of now.runs) {
      const old = before?.runs.find((candidate) => candidate.training_run_id === run.training_run_id);
      const found = rate(now, before, run.tokens, old?.tokens);
      this.rates.set(run.training_run_id, found);
    }
    const ids = now.runs.map((run) => run.training_run_id).reverse();
    for (const id of this.chosen) if (!ids.includes(id)) this.chosen.delete(id);
    this.compare.disabled = this.chosen.size < 2;
    this.live.update(ids.map((id) => ({ id })));
    if (ids.join() !== this.known) this.poll.now(); // a run has begun or ended
    this.known = ids.join();
    const all = "seconds_up" in now;
    show(this.models.whole, all);
    show(this.names_only, !all);
    show(this.memory_section, all);
    if (!all) {
      setText(this.names_only, now.models.flatMap((model) => model.names).join(", "));
      return;
    }
    this.models.update(now.models.map((model) => ({ id: model.names[0] })));
    this.memoryOf(now);
  }

  memoryOf(now) {
    const lines = [["Processes of the server", now.memory_bytes, null]];
    for (const gpu of now.gpus) lines.push([`GPU ${gpu.gpu}`, gpu.used_bytes, gpu.bytes]);
    if (this.memory.childElementCount !== lines.length) {
      this.memory.replaceChildren(
        ...lines.map(([name, , most]) => {
          const meter = most === null ? null : h("meter", { min: "0", max: String(most), "aria-label": `${name}: memory` });
          return h("p", {}, h("span", { class: "what" }, name), meter, h("span", { class: "much" }));
        }),
      );
    }
    for (const [at, [, used, most]] of lines.entries()) {
      const line = this.memory.children[at];
      if (most !== null) line.querySelector("meter").value = used;
      setText(line.querySelector(".much"), most === null ? bytes(used) : `${bytes(used)} of ${bytes(most)}`);
    }
  }
}
