// The page: which view is shown, the status of the server, and its key.

import { get, hasKey, useKey } from "./api.js";
import { CheckpointsView } from "./checkpoints.js";
import { h, setText, show } from "./dom.js";
import { duration } from "./format.js";
import { PlaygroundView } from "./playground.js";
import { Poll } from "./polling.js";
import { RunView } from "./run.js";
import { Names, RunsView, SessionView } from "./runs.js";

const element = (id) => document.getElementById(id);
const names = new Names();
const trouble = { status: null, view: null };
let view = null;
let now = null;
let before = null;
let lostAt = null;

// Views ---------------------------------------------------------------------------------------------------------------

function viewOf(parameters) {
  const failed = (error) => failedIn("view", error);
  const [runs, logs] = ["run", "log"].map((name) => [...new Set(parameters.getAll(name))]);
  if (runs.length || logs.length) return ["runs", new RunView(runs, names, failed, logs)];
  if (parameters.has("session")) return ["runs", new SessionView(parameters.get("session"), failed)];
  switch (parameters.get("view")) {
    case "checkpoints":
      return ["checkpoints", new CheckpointsView(failed)];
    case "playground":
      return ["playground", new PlaygroundView(parameters.get("model"), failed)];
    default:
      return ["runs", new RunsView(names, failed)];
  }
}

function route(moved) {
  view?.stop();
  failedIn("view", null);
  const [name, next] = viewOf(new URLSearchParams(location.hash.slice(1)));
  view = next;
  document.title = `${view.title} - tinker-local`;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  element("main").replaceChildren(view.node);
  if (now) view.status(now, before);
  view.start();
  if (moved) {
    scrollTo(0, 0);
    element("main").focus({ preventScroll: true });
  }
}

// Status --------------------------------------------------------------------------------------------------------------

const status = new Poll(
  async () => {
    const found = await get("api/v1/status");
    before = now;
    now = found;
    failedIn("status", null);
    await names.learn(now.runs.map((run) => run.training_run_id));
    const up = "seconds_up" in now ? `, up ${duration(now.seconds_up)}` : "";
    setText(element("about"), `version ${now.version}${up}`);
    const problems = element("problems");
    show(problems, now.problems.length > 0);
    const words = now.problems.join("\n");
    if (problems.dataset.words !== words) {
      problems.dataset.words = words;
      problems.replaceChildren(...now.problems.map((problem) => h("li", {}, problem)));
    }
    view.status(now, before);
  },
  2000,
  (error) => failedIn("status", error),
);

function words(error) {
  if (error.status === 0) return `No answer from the server since ${lostAt.toLocaleTimeString()}. Trying again.`;
  if (error.status === 503) return "The server is loading its models, or has no room for this request. Trying again.";
  if (error.status === 401) return "The server needs an API key.";
  return error.message;
}

/** `error`: what failed in a part of the page; null: it works. */
function failedIn(part, error) {
  if (error && !("status" in error)) console.error(error);
  trouble[part] = error;
  const first = trouble.status ?? trouble.view;
  if (first?.status === 0) lostAt ??= new Date();
  else lostAt = null;
  show(element("lost"), first !== null);
  setText(element("lost"), first === null ? "" : words(first));
  if (error?.status === 401) askKey();
}

// Key -----------------------------------------------------------------------------------------------------------------

let asked = false;

function askKey() {
  show(element("change-key"), true);
  if (asked || element("ask-key").open) return;
  asked = true; // once; then the button does
  openKey();
}

function openKey() {
  const why = hasKey() ? "The server does not know this key." : "This server has API keys.";
  setText(element("ask-key-why"), why);
  element("ask-key").showModal();
  element("key").focus();
}

element("change-key").addEventListener("click", openKey);
element("ask-key").addEventListener("submit", (event) => {
  const key = element("key").value.trim();
  const valid = /^[\x21-\x7e]+$/.test(key);
  show(element("key-error"), !valid);
  if (!valid) {
    event.preventDefault();
    return;
  }
  useKey(key);
  element("key").value = "";
  asked = false;
  before = now = null;
  status.now();
  route(false);
});

element("skip").addEventListener("click", (event) => {
  event.preventDefault();
  element("main").focus();
});
addEventListener("hashchange", () => route(true));
if (hasKey()) show(element("change-key"), true);
route(false);
status.start();
