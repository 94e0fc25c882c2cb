// Checkpoints of all recorded runs, live or ended, and how to use each.

import { ApiError, checkpointUrl, get, remove } from "./api.js";
import { commandList } from "./commands.js";
import { Table, h, show } from "./dom.js";
import { baseOf, bytes, moment } from "./format.js";
import { Pages } from "./pages.js";
import { Poll } from "./polling.js";

const PAGE = 100;
const KINDS = { training: "training state", sampler: "sampler", external: "export" };

/** Ask in a dialog; true if the answer is yes. */
function sure(path) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-text").textContent = `${path} will be deleted for good.`;
  dialog.returnValue = "no";
  dialog.showModal();
  document.getElementById("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

function stateOf(one) {
  if (one.missing) return "files are missing";
  if (one.unusable) return h("span", { title: one.unusable }, "cannot be loaded");
  return one.public ? "public" : "private";
}

export class CheckpointTable {
  constructor(caption, changed, failed) {
    this.changed = changed;
    this.failed = failed;
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.table = new Table(
      caption,
      [
        { title: "Path", cell: (one) => h("span", { class: "id" }, one.tinker_path) },
        { title: "Kind", cell: (one) => KINDS[one.checkpoint_type] ?? one.checkpoint_type },
        { title: "Base model", cell: baseOf },
        { title: "Size", number: true, cell: (one) => bytes(one.size_bytes) },
        { title: "Saved", cell: (one) => moment(one.time) },
        { title: "Expires", cell: (one) => moment(one.expires_at) },
        { title: "State", cell: stateOf },
        { title: "Use", cell: (one) => this.actions(one) },
      ],
      { key: (one) => one.tinker_path, empty: "There are no checkpoints." },
    );
    this.node = h("div", {}, this.error, this.table.whole);
  }

  update(checkpoints) {
    this.table.update(checkpoints);
  }

  actions(one) {
    const use = h("button", { type: "button", class: "small", "aria-expanded": "false" }, "Commands");
    use.setAttribute("aria-label", `Commands for ${one.tinker_path}`);
    use.addEventListener("click", () => this.toggle(use, one));
    const drop = h("button", { type: "button", class: "small danger" }, "Delete");
    drop.setAttribute("aria-label", `Delete ${one.tinker_path}`);
    drop.addEventListener("click", () => this.drop(one));
    const parts = [use];
    if (one.checkpoint_type === "sampler") {
      const to = `#${new URLSearchParams({ view: "playground", model: one.tinker_path })}`;
      parts.push(h("a", { class: "button small", href: to, "aria-label": `Try ${one.tinker_path}` }, "Try"));
    }
    return h("div", { class: "actions" }, parts, drop);
  }

  toggle(button, one) {
    const row = button.closest("tr");
    const open = row.nextSibling?.dataset.of === one.tinker_path;
    button.setAttribute("aria-expanded", String(!open));
    if (open) {
      row.nextSibling.remove();
      return;
    }
    const said = h("dl", { class: "facts" });
    const cell = h("td", { colspan: String(this.table.columns.length) }, said, commandList(one));
    row.after(h("tr", { class: "more", "data-of": one.tinker_path }, cell));
    this.tell(said, one);
  }

  /** What the program said of the run and of the checkpoint, such as the layout of its prompts. */
  async tell(said, one) {
    const run = one.tinker_path.slice("tinker://".length).split("/")[0];
    try {
      const record = await get(`api/v1/training_runs/${encodeURIComponent(run)}`);
      const entries = Object.entries({ ...record.user_metadata, ...one.user_metadata });
      said.replaceChildren(...entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }

  async drop(one) {
    if (!(await sure(one.tinker_path))) return;
    show(this.error, false);
    try {
      await remove(checkpointUrl(one.tinker_path));
    } catch (error) {
      if (!(error instanceof ApiError) || error.status === 0 || error.status === 401) this.failed(error);
      this.error.textContent = error.message;
      show(this.error, true);
    }
    this.changed();
  }
}

export class CheckpointsView {
  title = "Checkpoints";

  constructor(failed) {
    this.pages = new Pages(PAGE, () => this.poll.now());
    this.poll = new Poll(() => this.list(), 10000, failed);
    this.table = new CheckpointTable("Checkpoints", () => this.poll.now(), failed);
    this.node = h(
      "section",
      {},
      h("div", { class: "head" }, h("h2", {}, "Checkpoints"), this.pages.node),
      h("p", { class: "faint" }, "Of all recorded runs, live or ended; newest first."),
      this.table.node,
    );
  }

  start() {
    this.poll.start();
  }

  stop() {
    this.poll.stop();
  }

  status() {}

  async list() {
    const found = await get(`api/v1/checkpoints?limit=${PAGE}&offset=${this.pages.offset}`);
    this.pages.update(found.cursor.total_count);
    this.table.update(found.checkpoints);
  }
}
