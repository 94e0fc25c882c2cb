// Talk to a base model or a checkpoint, with text and pictures, and to two of them side by side.

import { ApiError, get, stream } from "./api.js";
import { h, setText, show } from "./dom.js";
import { moment, number } from "./format.js";
import { Poll } from "./polling.js";

const MOST_CHECKPOINTS = 1000;

function field(id, label, control) {
  control.id = id;
  return h("p", { class: "field" }, h("label", { for: id }, label), control);
}

function numberInput(value, attributes) {
  return h("input", { type: "number", value, ...attributes });
}

/** A file as a data URL. */
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
}

export class PlaygroundView {
  title = "Playground";

  constructor(model, failed) {
    this.failed = failed;
    this.wanted = model;
    this.bases = new Map();
    this.listed = "";
    this.turns = [];
    this.pictures = [];
    this.running = null;
    this.poll = new Poll(() => this.list(), 10000, failed);
    this.first = h("select");
    this.second = h("select", { disabled: true });
    this.both = h("input", { type: "checkbox", id: "both", on: { change: () => this.paired() } });
    this.kind = h(
      "select",
      { on: { change: () => this.kindChanged() } },
      h("option", { value: "chat" }, "chat, in the model's template"),
      h("option", { value: "text" }, "plain text that goes on"),
    );
    this.system = h("input", { type: "text", autocomplete: "off" });
    this.tokens = numberInput("256", { min: "1", step: "1" });
    this.temperature = numberInput("1", { min: "0", step: "any" });
    this.topP = numberInput("1", { min: "0", max: "1", step: "any" });
    this.seed = numberInput("", { step: "1", placeholder: "random" });
    this.log = h("ol", { class: "turns", role: "log", "aria-label": "Conversation" });
    this.text = h("textarea", { rows: "3" });
    this.files = h("input", { type: "file", accept: "image/png,image/jpeg", multiple: true });
    this.thumbs = h("ul", { class: "thumbs", "aria-label": "Pictures of the next message" });
    this.sendButton = h("button", { type: "submit", class: "primary" }, "Send");
    this.stopButton = h("button", { type: "button", disabled: true, on: { click: () => this.running?.abort() } }, "Stop");
    this.clearButton = h("button", { type: "button", on: { click: () => this.clear() } }, "New conversation");
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.systemField = field("system", "System message", this.system);
    this.filesField = field("files", "Pictures (PNG, JPEG; or paste one)", this.files);
    this.textLabel = h("label", { for: "message" }, "Message");
    this.text.id = "message";
    this.first.addEventListener("change", () => this.preset());
    this.files.addEventListener("change", () => this.add(this.files.files).then(() => (this.files.value = "")));
    this.text.addEventListener("paste", (event) => this.add(event.clipboardData.files));
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.form = h(
      "form",
      { class: "composer", on: { submit: (event) => (event.preventDefault(), this.send()) } },
      this.textLabel,
      this.text,
      this.filesField,
      this.thumbs,
      this.error,
      h("p", { class: "actions" }, this.sendButton, this.stopButton, this.clearButton, h("span", { class: "faint" }, "Ctrl+Enter sends")),
    );
    this.node = h(
      "div",
      { class: "playground" },
      h(
        "section",
        { class: "settings" },
        h("h2", {}, "Playground"),
        field("first", "Model", this.first),
        h("p", { class: "check" }, this.both, " ", h("label", { for: "both" }, "beside a second one")),
        field("second", "Second model", this.second),
        field("kind", "As", this.kind),
        this.systemField,
        h(
          "div",
          { class: "numbers" },
          field("tokens", "Max tokens", this.tokens),
          field("temperature", "Temperature", this.temperature),
          field("top-p", "Top p", this.topP),
          field("seed", "Seed", this.seed),
        ),
      ),
      h("section", { class: "talk" }, h("h3", { class: "unseen" }, "Conversation"), this.log, this.form),
    );
    this.paired();
  }

  start() {
    this.poll.start();
  }

  stop() {
    this.poll.stop();
    this.running?.abort();
  }

  status() {}

  // Models ------------------------------------------------------------------------------------------------------------

  async list() {
    const [models, found] = await Promise.all([get("v1/models"), get(`api/v1/checkpoints?limit=${MOST_CHECKPOINTS}`)]);
    const bases = models.data.filter((model) => model.owned_by === "base").map((model) => model.id);
    const served = new Set(models.data.map((model) => model.id));
    const checkpoints = found.checkpoints.filter((one) => served.has(one.tinker_path));
    for (const one of checkpoints) this.bases.set(one.tinker_path, one.base_model);
    const listed = JSON.stringify([bases, checkpoints.map((one) => one.tinker_path)]);
    if (listed === this.listed) return;
    this.listed = listed;
    const given = this.wanted && !served.has(this.wanted) ? [{ tinker_path: this.wanted }] : [];
    for (const select of [this.first, this.second]) {
      const chosen = select.value;
      const groups = [h("optgroup", { label: "Base models" }, bases.map((name) => h("option", { value: name }, name)))];
      const all = [...given, ...checkpoints];
      if (all.length) {
        const option = ({ tinker_path: path, time }) =>
          h("option", { value: path }, time ? `${path.slice("tinker://".length)} (${moment(time)})` : path);
        groups.push(h("optgroup", { label: "Checkpoints" }, all.map(option)));
      }
      select.replaceChildren(...groups);
      if (chosen && [...select.options].some((option) => option.value === chosen)) select.value = chosen;
      else if (select === this.first && this.wanted) select.value = this.wanted;
    }
    if (this.second.value === this.first.value) this.preset();
  }

  /** Beside a checkpoint stands its base, until another is chosen. */
  preset() {
    const base = this.bases.get(this.first.value);
    if (base) this.second.value = base;
  }

  paired() {
    this.second.disabled = !this.both.checked;
    show(this.second.parentElement, this.both.checked);
  }

  kindChanged() {
    const chat = this.kind.value === "chat";
    show(this.systemField, chat);
    show(this.filesField, chat);
    show(this.thumbs, chat);
    setText(this.textLabel, chat ? "Message" : "Text to go on with");
  }

  // Messages ----------------------------------------------------------------------------------------------------------

  async add(files) {
    this.fail(null);
    for (const file of [...files]) {
      if (!["image/png", "image/jpeg"].includes(file.type)) {
        this.fail(`${file.name}: neither a PNG nor a JPEG picture`);
        continue;
      }
      try {
        this.pictures.push({ name: file.name, url: await dataUrl(file) });
      } catch (error) {
        this.fail(error.message);
      }
    }
    this.showPictures();
  }

  showPictures() {
    const thumb = (picture) => {
      const drop = () => {
        this.pictures = this.pictures.filter((one) => one !== picture);
        this.showPictures();
        this.files.focus();
      };
      const button = h("button", { type: "button", class: "small", on: { click: drop }, "aria-label": `Remove ${picture.name}` }, "Remove");
      return h("li", {}, h("img", { src: picture.url, alt: picture.name }), button);
    };
    this.thumbs.replaceChildren(...this.pictures.map(thumb));
  }

  fail(message) {
    show(this.error, message !== null);
    this.error.textContent = message ?? "";
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    this.log.replaceChildren();
    this.fail(null);
    this.text.focus();
  }

  /** What is sent for side number `at`; the turn that is asked is the last one. */
  body(at, model) {
    const settings = {
      model,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: this.tokens.valueAsNumber,
      temperature: this.temperature.valueAsNumber,
      top_p: this.topP.valueAsNumber,
    };
    if (this.seed.value !== "") settings.seed = this.seed.valueAsNumber;
    const asked = this.turns.at(-1);
    if (!asked.chat) return ["v1/completions", { ...settings, prompt: asked.text }];
    const messages = [];
    if (this.system.value) messages.push({ role: "system", content: this.system.value });
    for (const turn of this.turns) {
      const answer = turn.answers[at];
      if (!turn.chat || (turn !== asked && !answer)) continue;
      const pictures = turn.pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
      const text = turn.text ? [{ type: "text", text: turn.text }] : [];
      messages.push({ role: "user", content: [...pictures, ...text] });
      if (turn !== asked) messages.push({ role: "assistant", content: answer });
    }
    return ["v1/chat/completions", { ...settings, messages }];
  }

  async send() {
    if (this.running) return;
    for (const input of [this.tokens, this.temperature, this.topP, this.seed]) if (!input.reportValidity()) return;
    const chat = this.kind.value === "chat";
    const turn = { chat, text: this.text.value, pictures: chat ? this.pictures : [], answers: [] };
    const models = [this.first.value, ...(this.both.checked ? [this.second.value] : [])];
    if (!models[0]) return this.fail("There is no model yet.");
    if (!turn.text && !turn.pictures.length) return this.fail("The message is empty.");
    this.fail(null);
    this.turns.push(turn);
    const panes = models.map(() => new Pane());
    for (const [at, pane] of panes.entries()) pane.head.textContent = models[at];
    const asked = h("div", { class: "asked" }, turn.pictures.map(({ name, url }) => h("img", { src: url, alt: name })), h("p", { class: "said" }, turn.text));
    this.log.append(h("li", {}, asked, h("div", { class: `answers n${panes.length}` }, panes.map((pane) => pane.node))));
    this.text.value = "";
    this.pictures = [];
    this.showPictures();
    this.running = new AbortController();
    this.stopButton.disabled = false;
    this.sendButton.disabled = true;
    const { signal } = this.running;
    const bodies = models.map((model, at) => this.body(at, model));
    await Promise.all(panes.map(async (pane, at) => (turn.answers[at] = await this.answer(pane, ...bodies[at], signal))));
    this.running = null;
    this.stopButton.disabled = true;
    this.sendButton.disabled = false;
  }

  /** The text of an answer, shown as it comes; empty if there is none. */
  async answer(pane, path, body, signal) {
    const begun = performance.now();
    let first = null;
    let reason = null;
    let usage = null;
    pane.node.scrollIntoView({ block: "nearest" });
    try {
      for await (const event of stream(path, body, signal)) {
        usage = event.usage ?? usage;
        const [choice] = event.choices;
        if (!choice) continue;
        reason = choice.finish_reason ?? reason;
        const text = choice.delta?.content ?? choice.text ?? "";
        if (text) first ??= performance.now();
        pane.add(text);
      }
      const seconds = (performance.now() - begun) / 1000;
      const words = [`${usage.completion_tokens} tokens`, `${number(usage.completion_tokens / seconds)} tokens/s`];
      if (first !== null) words.push(`first after ${((first - begun) / 1000).toFixed(2)} s`);
      if (reason === "length") words.push("cut at max tokens");
      pane.end(words.join(", "));
    } catch (error) {
      if (error.name === "AbortError") pane.end("stopped");
      else pane.fail(error.message);
      if (error instanceof ApiError && error.status === 401) this.failed(error);
    }
    return pane.text.textContent;
  }
}

/** One answer. */
class Pane {
  constructor() {
    this.head = h("h4", { class: "id" });
    this.text = h("p", { class: "said" });
    this.foot = h("p", { class: "faint" }, "...");
    this.node = h("article", { "aria-busy": "true" }, this.head, this.text, this.foot);
  }

  add(text) {
    if (text) this.text.append(text);
  }

  end(words) {
    this.foot.textContent = words;
    this.node.setAttribute("aria-busy", "false");
  }

  fail(message) {
    this.end(message);
    this.foot.className = "error";
  }
}
