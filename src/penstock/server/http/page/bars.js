// What the machine is shown with: bars with a legend, and rows of names and values.

import { make, write } from "./dom.js";

/** Built once for each set of names, and then only filled: what does not change is not announced, selected text stays selected. */
export class Bars {
  constructor() {
    this.names = null;
    this.node = make("div");
  }

  /** parts: class, name, amount, what it is written as. of: of which they are parts, or less. */
  show(parts, of, said) {
    const names = parts.map((part) => part.name).join();
    if (names !== this.names) {
      this.names = names;
      this.bar = make("div", { className: "bar" }, ...parts.map((part) => make("span", { className: part.kind })));
      this.bar.setAttribute("role", "img");
      this.legend = make("ul", { className: "legend" }, ...parts.map((part) => make("li", { className: part.kind }, make("span", { textContent: part.name }), make("b"))));
      this.node.replaceChildren(this.bar, this.legend);
    }
    this.bar.setAttribute("aria-label", said);
    parts.forEach((part, at) => {
      this.bar.children[at].style.width = of ? `${(100 * part.amount) / of}%` : "0";
      write(this.legend.children[at].lastChild, part.written);
    });
  }
}

/** Names and values, and a line below them that has an unseen name; what has not changed stays as it is. */
export function showRows(node, rows, name, last) {
  const said = JSON.stringify([rows, last]);
  if (node.dataset.said === said) return;
  node.dataset.said = said;
  const nodes = rows.flatMap(([one, value]) => [make("dt", { textContent: one }), make("dd", { textContent: value })]);
  node.replaceChildren(...nodes, make("dt", { className: "unseen", textContent: name }), make("dd", { className: "wide", textContent: last }));
}
