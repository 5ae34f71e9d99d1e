// Text files that go with the next message.

import { $, button, make, tell } from "./dom.js";
import { counted, number, size } from "./numbers.js";
import { post } from "./server.js";
import { model } from "./settings.js";

/** Bytes of a file that is read at all: a page holds it in memory, and the server reads the whole conversation each time. */
const MOST = 8 << 20;

/** Files that wait for the message: name, text, tokens (0 if the server did not say). */
export let pending = [];

/** How many are being read: a message waits for them. */
export let reading = 0;

export function clear() {
  pending = [];
  show();
}

/** Add files one by one; what cannot be attached is said. */
export async function attach(files) {
  tell("");
  reading += files.length;
  const refused = [];
  for (const file of files) {
    try {
      pending = [...pending, await read(file)];
      show();
    } catch (fault) {
      refused.push(fault.message);
      tell(refused.join(" "));
    }
    reading -= 1;
  }
  $("say").focus();
}

/** Raise Error with a line for the person. */
async function read(file) {
  if (file.size > MOST) throw new Error(`${file.name} has ${size(file.size)}. Attach a text file of at most ${size(MOST)}.`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no text in UTF-8. Attach a text file.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text. Attach a text file.`);
  if (!text.trim()) throw new Error(`${file.name} is empty.`);
  const found = await measured(text);
  if (found && found.count >= found.max_model_len) {
    throw new Error(`${file.name} has ${counted(found.count, "token")}. The model’s context holds ${number(found.max_model_len)}. Attach a part of it.`);
  }
  return { name: file.name, text, tokens: found?.count ?? 0 };
}

/** What the server says of the length of a text; null if it says nothing. */
async function measured(text) {
  try {
    return await (await post("/tokenize", { model: model(), prompt: text, add_special_tokens: false }, AbortSignal.timeout(60000))).json();
  } catch {
    return null;
  }
}

export function chip(file, remove) {
  const about = file.tokens ? counted(file.tokens, "token") : size(file.text.length);
  const node = make("li", {}, make("span", { className: "name", textContent: file.name }), make("span", { className: "about", textContent: about }));
  if (remove) node.append(button("✕", remove, { title: "Remove", ariaLabel: `Remove ${file.name}` }));
  return node;
}

function show() {
  $("files").replaceChildren(...pending.map((file) => chip(file, () => {
    pending = pending.filter((one) => one !== file);
    show();
    $("say").focus();
  })));
  $("files").hidden = !pending.length;
}

$("attach").addEventListener("click", () => $("pick").click());
$("pick").addEventListener("change", async () => {
  const files = [...$("pick").files];
  $("pick").value = "";
  await attach(files);
});
document.addEventListener("dragover", (event) => {
  if (event.dataTransfer.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});
$("say").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
});
