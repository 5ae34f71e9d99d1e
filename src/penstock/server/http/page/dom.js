// What every part of the page uses. What comes from the model or the server becomes text nodes and nothing else.

export const $ = (id) => document.getElementById(id);

/** Make an element: properties as they are named in the DOM, children as nodes or text. */
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function button(label, does, properties = {}) {
  const node = make("button", { type: "button", textContent: label, ...properties });
  node.addEventListener("click", does);
  return node;
}

export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Show a line above the message field; an empty text takes it away. */
export function tell(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Copy a text, and say so on the button for a moment. */
export async function copy(text, node) {
  const label = node.dataset.label ??= node.textContent;
  write(node, (await copied(text)) ? "Copied" : "Not copied");
  setTimeout(() => write(node, label), 1500);
}

/** A page that came by plain HTTP from another machine has no clipboard; there a selected text is copied. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* The other way is tried. */ }
  const before = document.activeElement;
  const field = make("textarea", { value: text, readOnly: true, className: "unseen", ariaHidden: "true" });
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
    before?.focus();
  }
}

/** Give a file to the person. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
