// What is sent in a conversation: texts and pictures in the order that a model was trained with.

/** Parts of a message with all pictures before or after its texts; another order: as they were given. */
export function inOrder(parts, order) {
  const pictures = parts.filter((part) => part.url !== undefined);
  const texts = parts.filter((part) => part.url === undefined);
  if (order === "picture-first") return [...pictures, ...texts];
  if (order === "text-first") return [...texts, ...pictures];
  return parts;
}

/** Parts of a message as OpenAI's API takes them. */
function contentOf(parts) {
  return parts.map(({ url, text }) =>
    url === undefined ? { type: "text", text } : { type: "image_url", image_url: { url } },
  );
}

/**
 * Messages for side number `at`; the last turn is the one that is asked.
 * turns: [{ chat, parts: [{ text } or { name, url }], answers: [text] }].
 */
export function messagesOf(turns, at, system, order) {
  const messages = system ? [{ role: "system", content: system }] : [];
  const asked = turns.at(-1);
  for (const turn of turns) {
    const answer = turn.answers[at];
    if (!turn.chat || (turn !== asked && !answer)) continue;
    messages.push({ role: "user", content: contentOf(inOrder(turn.parts, order)) });
    if (turn !== asked) messages.push({ role: "assistant", content: answer });
  }
  return messages;
}

/** Width and height with at most `side` pixels a side, as Pillow's `thumbnail` makes them; null: it is small enough. */
export function shrunkSize(width, height, side) {
  const longest = Math.max(width, height);
  if (!side || longest <= side) return null;
  return [width, height].map((pixels) => Math.max(1, Math.round((pixels * side) / longest)));
}

/** A layout of `v1/models/NAME` in words; empty if nothing is known. */
export function layoutWords({ order, side } = {}) {
  const words = [];
  if (order) words.push(order === "picture-first" ? "pictures before the text" : "pictures after the text");
  if (side) words.push(`pictures of at most ${side} pixels a side`);
  return words.length ? `Trained with ${words.join(" and ")}.` : "";
}
