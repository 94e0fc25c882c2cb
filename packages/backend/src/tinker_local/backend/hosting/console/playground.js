// Talk to a base model or a checkpoint, with text and pictures, and to two of them side by side.

import { ApiError, get, stream } from "./api.js";
import { inOrder, layoutWords, messagesOf, shrunkSize } from "./conversation.js";
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

/** The picture of a data URL. */
async function opened(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

/** A data URL of a picture, on white, with at most `side` pixels a side; 0: unchanged. */
async function shrunk({ url, width, height }, side) {
  const size = shrunkSize(width, height, side);
  if (!size) return url;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, ...size);
  context.imageSmoothingQuality = "high";
  context.drawImage(await opened(url), 0, 0, ...size);
  return canvas.toDataURL("image/png");
}

export class PlaygroundView {
  title = "Playground";

  constructor(model, failed) {
    this.failed = failed;
    this.wanted = model;
    this.bases = new Map();
    this.layouts = new Map();
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
    this.order = h(
      "select",
      {},
      h("option", { value: "" }, "as trained, if known; else as given"),
      h("option", { value: "picture-first" }, "before the text"),
      h("option", { value: "text-first" }, "after the text"),
      h("option", { value: "given" }, "as given"),
    );
    this.side = numberInput("", { min: "0", step: "1", placeholder: "as trained, if known; 0: never shrunk" });
    this.trained = h("p", { class: "faint", role: "status", hidden: true });
    this.log = h("ol", { class: "turns", role: "log", "aria-label": "Conversation" });
    this.text = h("textarea", { rows: "3" });
    this.files = h("input", { type: "file", accept: "image/png,image/jpeg", multiple: true });
    this.thumbs = h("ul", { class: "thumbs", "aria-label": "Pictures of the next message" });
    this.sent = h("p", { class: "faint", role: "status", hidden: true });
    this.sendButton = h("button", { type: "submit", class: "primary" }, "Send");
    this.stopButton = h("button", { type: "button", disabled: true, on: { click: () => this.running?.abort() } }, "Stop");
    this.clearButton = h("button", { type: "button", on: { click: () => this.clear() } }, "New conversation");
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.systemField = field("system", "System message", this.system);
    this.filesField = field("files", "Pictures (PNG, JPEG; or paste one)", this.files);
    this.textLabel = h("label", { for: "message" }, "Message");
    this.text.id = "message";
    this.orderField = field("order", "Pictures stand", this.order);
    this.sideField = field("side", "Pictures' longest side in pixels", this.side);
    this.first.addEventListener("change", () => this.preset());
    for (const control of [this.first, this.second, this.both, this.order, this.side, this.text]) {
      control.addEventListener("change", () => this.tell());
    }
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
      this.sent,
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
        this.trained,
        field("kind", "As", this.kind),
        this.systemField,
        this.orderField,
        this.sideField,
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
    await this.tell();
  }

  models() {
    return [this.first.value, ...(this.both.checked ? [this.second.value] : [])].filter((name) => name);
  }

  /** How a model was trained, as far as its program said. */
  async layoutOf(model) {
    if (!this.layouts.has(model)) {
      const found = await get(`v1/models/${encodeURIComponent(model)}`);
      this.layouts.set(model, found.prompt_layout ?? {});
    }
    return this.layouts.get(model);
  }

  /** How pictures are sent to a model: [order, longest side]. */
  async formOf(model) {
    const { order, side } = await this.layoutOf(model);
    return [this.order.value || order, this.side.value === "" ? side : this.side.valueAsNumber];
  }

  /** Say how the models were trained, and what that makes of the pictures of the next message. */
  async tell() {
    const trained = [];
    const sent = [];
    try {
      for (const model of this.models()) {
        const words = layoutWords(await this.layoutOf(model));
        if (words) trained.push(this.both.checked ? `${model}: ${words}` : words);
        if (!this.pictures.length) continue;
        const [order, side] = await this.formOf(model);
        const names = inOrder(this.parts(), order).map(({ name }) => name ?? "the text");
        for (const { name, width, height } of this.pictures) {
          const size = shrunkSize(width, height, side);
          if (size) names[names.indexOf(name)] = `${name} (${size.join(" x ")} pixels instead of ${width} x ${height})`;
        }
        sent.push(`${this.both.checked ? `${model} gets` : "Sent"} in this order: ${names.join(", ")}.`);
      }
    } catch {
      // A model that cannot be asked says so when it is.
    }
    show(this.trained, trained.length > 0);
    setText(this.trained, trained.join(" "));
    show(this.sent, sent.length > 0);
    setText(this.sent, sent.join(" "));
  }

  /** The next message, as it was given: pictures that were added after the text was begun stand after it. */
  parts() {
    const [before, after] = [false, true].map((late) => this.pictures.filter((picture) => picture.late === late));
    return [...before, { text: this.text.value }, ...after];
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
    for (const node of [this.filesField, this.thumbs, this.sent, this.orderField, this.sideField]) show(node, chat);
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
        const late = this.text.value !== "";
        const url = await dataUrl(file);
        const { naturalWidth: width, naturalHeight: height } = await opened(url);
        this.pictures.push({ name: file.name, url, width, height, late });
      } catch (error) {
        this.fail(error instanceof DOMException ? `${file.name}: no picture that can be read` : error.message);
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
    this.tell();
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
  async body(at, model) {
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
    if (!asked.chat) return ["v1/completions", { ...settings, prompt: asked.parts[0].text }];
    const [order, side] = await this.formOf(model);
    const sized = async (part) => (part.url === undefined ? part : { ...part, url: await shrunk(part, side) });
    const turns = [];
    for (const turn of this.turns) turns.push({ ...turn, parts: await Promise.all(turn.parts.map(sized)) });
    return ["v1/chat/completions", { ...settings, messages: messagesOf(turns, at, this.system.value, order) }];
  }

  async send() {
    if (this.running) return;
    const inputs = [this.tokens, this.temperature, this.topP, this.seed, this.side];
    for (const input of inputs) if (!input.reportValidity()) return;
    const chat = this.kind.value === "chat";
    const turn = { chat, parts: this.parts().filter(({ url, text }) => (url === undefined ? text : chat)), answers: [] };
    const models = this.models();
    if (!models.length) return this.fail("There is no model yet.");
    if (!turn.parts.length) return this.fail("The message is empty.");
    this.fail(null);
    this.turns.push(turn);
    const panes = models.map(() => new Pane());
    for (const [at, pane] of panes.entries()) pane.head.textContent = models[at];
    const shown = ({ name, url, text }) => (url === undefined ? h("p", { class: "said" }, text) : h("img", { src: url, alt: name }));
    const asked = h("div", { class: "asked" }, turn.parts.map(shown));
    this.log.append(h("li", {}, asked, h("div", { class: `answers n${panes.length}` }, panes.map((pane) => pane.node))));
    this.text.value = "";
    this.pictures = [];
    this.showPictures();
    this.running = new AbortController();
    this.stopButton.disabled = false;
    this.sendButton.disabled = true;
    const { signal } = this.running;
    const answered = async (pane, at) => {
      turn.answers[at] = await this.answer(pane, () => this.body(at, models[at]), signal);
    };
    await Promise.all(panes.map(answered));
    this.running = null;
    this.stopButton.disabled = true;
    this.sendButton.disabled = false;
  }

  /** The text of an answer, shown as it comes; empty if there is none. */
  async answer(pane, bodyOf, signal) {
    const begun = performance.now();
    let first = null;
    let reason = null;
    let usage = null;
    pane.node.scrollIntoView({ block: "nearest" });
    try {
      for await (const event of stream(...(await bodyOf()), signal)) {
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
