// Pages of a long list: where this one begins, and buttons to the others.

import { h, setText, show } from "./dom.js";
import { integer } from "./format.js";

export class Pages {
  constructor(size, changed) {
    this.size = size;
    this.offset = 0;
    this.words = h("span", { class: "faint", role: "status" });
    const button = (text, by) =>
      h("button", { type: "button", class: "small", on: { click: () => ((this.offset += by * size), changed()) } }, text);
    this.newer = button("Newer", -1);
    this.older = button("Older", 1);
    this.node = h("p", { class: "pages" }, this.words, this.newer, this.older);
  }

  update(total) {
    while (this.offset > 0 && this.offset >= total) this.offset -= this.size;
    const last = Math.min(total, this.offset + this.size);
    setText(this.words, total ? `${integer(this.offset + 1)} to ${integer(last)} of ${integer(total)}` : "");
    this.newer.disabled = this.offset === 0;
    this.older.disabled = last >= total;
    const several = total > this.size;
    show(this.newer, several);
    show(this.older, several);
  }
}
