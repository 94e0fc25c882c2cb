// One run, or several beside each other, with the logs of their programs: curves of everything that is recorded, and
// checkpoints. Or a log alone.

import { ApiError, get } from "./api.js";
import { Chart } from "./chart.js";
import { CheckpointTable } from "./checkpoints.js";
import { Table, h, setText, show } from "./dom.js";
import { baseOf, bytes, duration, integer, moment, number, owner } from "./format.js";
import { Poll } from "./polling.js";
import { BUILT_IN, Curve, GROUPS, isOfGroup, ofGroup, titleOf } from "./series.js";

export class RunView {
  /** `logs`: ids of logs that are shown too, besides those that name one of the runs. */
  constructor(ids, names, failed, logs = []) {
    this.ids = ids;
    this.names = names;
    this.title = ids.length === 1 ? `Run ${ids[0]}` : ids.length ? `${ids.length} runs` : "Log";
    this.curves = new Map(ids.map((id) => [id, new Curve()]));
    this.chosenLogs = logs;
    this.logs = new Map();
    this.watches = true;
    this.charts = new Map();
    this.drawn = "";
    this.by = h("select", { id: "by" }, h("option", { value: "step" }, "step"), h("option", { value: "time" }, "time since the first point"));
    this.logarithmic = h("input", { type: "checkbox", id: "logarithmic" });
    for (const control of [this.by, this.logarithmic]) control.addEventListener("change", () => this.draw(true));
    this.facts = h("dl", { class: "facts" });
    this.note = h("p", { class: "faint", role: "status" }, "Reading the curves ...");
    this.grid = h("div", { class: "charts" });
    this.checkpoints = ids.length === 1 ? new CheckpointTable("Checkpoints of this run", () => this.polls[1].now(), failed) : null;
    this.ephemeral = new Table(
      "Ephemeral sampler versions",
      [
        { title: "Sampler", cell: (one) => h("span", { class: "id" }, one.sampler_id) },
        { title: "Size", number: true, cell: (one) => bytes(one.size_bytes) },
        { title: "Samples in flight", number: true, cell: (one) => integer(one.samples) },
      ],
      { key: (one) => one.sampler_id, empty: "" },
    );
    this.ephemeralTitle = h("h3", {}, "");
    this.ephemeralSection = h("section", { hidden: true }, this.ephemeralTitle, this.ephemeral.whole);
    this.polls = [new Poll(() => this.read(), 2000, failed), new Poll(() => this.list(), 10000, failed)];
    const title = ids.length === 1 ? h("h2", { class: "id" }, ids[0]) : h("h2", {}, this.title);
    this.node = h(
      "div",
      {},
      h("section", {}, title, this.facts),
      h(
        "section",
        {},
        h(
          "div",
          { class: "head" },
          h("h3", {}, "Curves"),
          h(
            "p",
            { class: "controls" },
            h("label", { for: "by" }, "Across"),
            this.by,
            h("span", {}, this.logarithmic, " ", h("label", { for: "logarithmic" }, "logarithmic where all is above 0")),
          ),
        ),
        this.note,
        this.grid,
      ),
      this.checkpoints && h("section", {}, h("h3", {}, "Checkpoints"), this.checkpoints.node),
      this.ephemeralSection,
    );
  }

  start() {
    for (const poll of this.polls) poll.start();
  }

  stop() {
    for (const poll of this.polls) poll.stop();
    for (const chart of this.charts.values()) chart.close();
  }

  status(now) {
    this.now = now;
    const live = this.ids.length === 1 ? now.runs.find((run) => run.training_run_id === this.ids[0]) : null;
    const count = live?.ephemeral_version_count ?? 0;
    show(this.ephemeralSection, count > 0);
    if (count) {
      const listed = live.ephemeral_versions;
      const words = count > listed.length ? `, the last used ${integer(listed.length)} of ${integer(count)}` : "";
      setText(this.ephemeralTitle, `Ephemeral sampler versions${words}`);
      this.ephemeral.update(listed);
    }
    if (this.record) this.tell();
  }

  async read() {
    for (const [id, curve] of this.curves) {
      const fetchPiece = (after) => get(`api/v1/training_runs/${encodeURIComponent(id)}/curve?after=${after}`);
      try {
        await curve.read(fetchPiece, () => this.draw(false));
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 404) throw error;
        setText(this.note, error.message);
        show(this.note, true);
        return;
      }
    }
    for (const [id, log] of this.logs) await this.readLog(id, log);
    const logs = [...this.logs.values()].map((log) => [log.name, log.curve]);
    const read = [...this.curves, ...logs];
    const points = read.some(([, curve]) => curve.series.size);
    const full = read.filter(([, curve]) => curve.full).map(([id]) => id);
    show(this.note, !points || full.length > 0);
    if (!points) setText(this.note, "No optimizer step is recorded yet, and no metric.");
    else if (full.length) setText(this.note, `The record is full, later steps are not in it: ${full.join(", ")}`);
  }

  async readLog(id, log) {
    const path = `api/v1/logs/${encodeURIComponent(id)}/curve`;
    const fetchPiece = (after, file) => get(`${path}?${new URLSearchParams({ after, file })}`);
    try {
      await log.curve.read(fetchPiece, () => this.draw(false));
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error; // else it is gone; what was read stays
    }
  }

  async listLogs() {
    if (!this.watches) return;
    const found = await get("api/v1/logs");
    this.watches = found.watches;
    for (const log of found.logs) {
      const wanted = this.chosenLogs.includes(log.log_id) || this.ids.includes(log.training_run_id);
      if (wanted && !this.logs.has(log.log_id)) this.logs.set(log.log_id, { ...log, curve: new Curve() });
    }
    const missing = this.chosenLogs.filter((id) => !this.logs.has(id));
    if (missing.length) setText(this.note, `The server has no log ${missing.join(", ")}, or no longer.`);
    else await this.polls[0].now();
  }

  async list() {
    await this.listLogs();
    await this.names.learn(this.ids);
    if (this.ids.length !== 1) {
      this.record = {};
      this.tell();
      return;
    }
    const path = `api/v1/training_runs/${encodeURIComponent(this.ids[0])}`;
    try {
      const [record, found] = await Promise.all([get(path), get(`${path}/checkpoints`)]);
      this.record = record;
      this.checkpoints.update(found.checkpoints.map((one) => ({ base_model: record.base_model, ...one })).reverse());
      this.tell();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 404) throw error;
      setText(this.note, error.message);
    }
  }

  /** The facts of the runs. */
  tell() {
    const facts = this.ids.length === 1 ? this.factsOfOne() : this.ids.map((id) => [this.names.name(id) || "run", id]);
    for (const log of this.logs.values()) facts.push(["log", log.name]);
    if (this.facts.childElementCount !== facts.length) {
      this.facts.replaceChildren(...facts.map(() => h("div", {}, h("dt"), h("dd"))));
    }
    for (const [at, [name, value]] of facts.entries()) {
      const { firstChild, lastChild } = this.facts.children[at];
      setText(firstChild, name);
      setText(lastChild, value);
    }
  }

  factsOfOne() {
    const [id] = this.ids;
    const { record } = this;
    const live = this.now?.runs.find((run) => run.training_run_id === id);
    const facts = [
      ["state", live ? "live" : "ended"],
      ["session", this.names.name(id) || id.split(":")[0]],
      ["owner", owner(record.model_owner)],
      ["base model", baseOf(record)],
      ["rank", integer(record.lora_rank)],
      ...Object.entries(record.user_metadata ?? {}),
    ];
    if (!live) return [...facts, ["last request", moment(record.last_request_time)]];
    const apart = live.last?.mismatch?.all;
    return [
      ...facts,
      ["begun", moment(live.created_at)],
      ["steps", `${integer(live.steps)}, ${integer(live.unsaved_steps)} unsaved`],
      ["tokens", integer(live.tokens)],
      ["loss", number(live.last?.loss) || "none yet"],
      ["learning rate", number(live.last?.learning_rate) || "none yet"],
      ...(apart ? [["KL(sampler, trainer)", `${number(apart.kl)} nats/token, ratios up to ${number(apart.largest_ratio)}`]] : []),
      ["last step", live.last ? `${duration(this.now.time - live.last.time)} ago` : "none yet"],
      ["queued", integer(live.queued)],
    ];
  }

  draw(anyway) {
    const logs = [...this.logs.values()].map((log, at) => [log.name, log.curve, this.ids.length + at]);
    const all = [...this.curves].map(([id, curve]) => [this.label(id), curve, this.ids.indexOf(id)]).concat(logs);
    const version = all.map(([, curve]) => curve.version).join();
    if (!anyway && version === this.drawn) return;
    this.drawn = version;
    const found = new Set(all.flatMap(([, curve]) => [...curve.series.keys()]));
    for (const [name, chart] of this.charts) {
      if (found.has(name)) continue;
      chart.close();
      chart.node.remove();
      this.charts.delete(name);
    }
    const logged = [...found].filter((name) => !BUILT_IN.has(name) && !isOfGroup(name)).sort();
    const names = [...[...BUILT_IN.keys()].filter((name) => found.has(name)), ...logged];
    for (const [at, name] of names.entries()) {
      if (!this.charts.has(name)) {
        const chart = new Chart(titleOf(name));
        this.charts.set(name, chart);
        this.grid.insertBefore(chart.node, this.grid.children[at] ?? null);
      }
      const lines = [];
      for (const [label, curve, color] of all) {
        const series = curve.series.get(name);
        const placed = this.by.value === "step" || curve.begin !== null; // a log has no times
        if (!series || !placed) continue;
        const apart = all.length === 1 ? this.groups(curve, name) : [];
        if (apart.length > 1) lines.push(...apart);
        else lines.push({ name: label, series, begin: curve.begin, color });
      }
      const chart = this.charts.get(name);
      show(chart.node, lines.length > 0);
      chart.update(lines, this.by.value, this.logarithmic.checked);
    }
  }

  /** A line for each group of sampled tokens that a run has a series of. */
  groups(curve, name) {
    const lines = [];
    for (const [at, [group, title]] of [...GROUPS].entries()) {
      const series = curve.series.get(ofGroup(name, group));
      if (series) lines.push({ name: title, series, begin: curve.begin, color: at });
    }
    return lines;
  }

  /** What a run is called in a legend: its session's name, if no other run here has the same. */
  label(id) {
    const called = this.names.name(id);
    return called && this.ids.every((other) => other === id || this.names.name(other) !== called) ? called : id;
  }
}
