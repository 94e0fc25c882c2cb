// Elements. Every text from the server becomes a text node, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function show(node, visible) {
  node.hidden = !visible;
}

/** Set a text only if it changed, so that a selection in the page and what a screen reader says stay. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * A table that is updated in place: rows are known by a key, so that focus and selections stay.
 * columns: [{ title, number, cell(item) -> string or Node }]; a cell that is a Node is made once for each row.
 */
export class Table {
  constructor(caption, columns, { key, empty }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = h("tbody");
    this.empty = h("p", { class: "faint" }, empty);
    const head = columns.map((column) =>
      h("th", { scope: "col", class: column.number ? "number" : null }, column.title),
    );
    this.table = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), this.body);
    this.node = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
    this.whole = h("div", {}, this.node, this.empty);
  }

  update(items) {
    const seen = new Set();
    let before = null;
    for (const item of items) {
      const key = this.key(item);
      if (seen.has(key)) continue;
      seen.add(key);
      let row = this.rows.get(key);
      if (!row) {
        row = { node: h("tr"), cells: [] };
        for (const [at, column] of this.columns.entries()) {
          const name = at === 0 ? "th" : "td";
          const made = column.cell(item);
          const title = typeof made === "string" && name === "td" && !column.number ? made : null;
          const cell = h(name, { title, class: column.number ? "number" : null, scope: at === 0 ? "row" : null }, made);
          row.cells.push(made instanceof Node ? null : cell);
          row.node.append(cell);
        }
        this.rows.set(key, row);
      } else {
        for (const [at, cell] of row.cells.entries()) if (cell) setText(cell, this.columns[at].cell(item));
      }
      const place = before === null ? this.body.firstChild : before.nextSibling;
      if (row.node !== place) this.body.insertBefore(row.node, place);
      before = row.node;
      while (before.nextSibling && before.nextSibling.dataset.of === key) before = before.nextSibling;
    }
    for (const [key, row] of this.rows) {
      if (seen.has(key)) continue;
      for (let next = row.node.nextSibling; next && next.dataset.of === key; next = row.node.nextSibling) next.remove();
      row.node.remove();
      this.rows.delete(key);
    }
    show(this.node, items.length > 0);
    show(this.empty, items.length === 0);
  }
}

/** A command with a button that copies it. */
export function command(what, text) {
  const code = h("code", {}, text);
  const said = h("span", { role: "status", class: "faint" });
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "copied";
    } catch {
      // Only pages of this machine, or over https, may write to the clipboard.
      getSelection().selectAllChildren(code);
      said.textContent = "selected; copy with your keyboard";
    }
    setTimeout(() => (said.textContent = ""), 3000);
  }
  const button = h("button", { type: "button", class: "small", "aria-label": `Copy: ${what}`, on: { click: copy } }, "Copy");
  return h("div", { class: "command" }, h("h4", {}, what), h("pre", { tabindex: "0", "aria-label": what }, code), h("p", {}, button, " ", said));
}
