// Requests to this server, with the key of this tab if it has one.

const KEY = "tinker-local-key";

/** `status`: of HTTP; 0: no answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Without a right key, requests would only make the server answer slower: none is sent until there is another. */
let refused = null;

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
  refused = null;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

async function send(path, options = {}) {
  if (refused !== null) throw refused;
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers["X-API-Key"] = key;
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "no answer from the server");
  }
  if (answer.ok) return answer;
  const error = new ApiError(answer.status, await reason(answer));
  if (answer.status === 401 && key === sessionStorage.getItem(KEY)) refused = error;
  throw error;
}

async function reason(answer) {
  try {
    const body = await answer.json();
    return String(body.detail ?? body.error?.message ?? `HTTP ${answer.status}`);
  } catch {
    return `HTTP ${answer.status}`;
  }
}

export async function get(path, { signal } = {}) {
  return (await send(path, { signal })).json();
}

export async function post(path, body, { signal } = {}) {
  return (await send(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}

export async function remove(path) {
  await send(path, { method: "DELETE" });
}

/** The events of a streamed answer, parsed; an error in the stream is thrown. */
export async function* stream(path, body, signal) {
  const answer = await send(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the connection to the server was lost");
    }
    if (part.done) throw new ApiError(0, "the answer ended before it was whole");
    rest += part.value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(500, String(parsed.error.message));
      yield parsed;
    }
  }
}

/** `tinker://RUN/KIND/NAME` below the API. */
export function checkpointUrl(path) {
  const [run, kind, ...name] = path.slice("tinker://".length).split("/");
  const parts = [run, "checkpoints", kind, name.join("/")].map(encodeURIComponent);
  return `api/v1/training_runs/${parts.join("/")}`;
}
