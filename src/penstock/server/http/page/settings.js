// The model that answers, and how it is to.

import { keepSettings, keptSettings } from "./chats.js";
import { $, make, tell } from "./dom.js";
import { ask } from "./server.js";

const SETTINGS = "penstock.settings";
const FIELDS = { system: String, temperature: Number, top_p: Number, max_tokens: Number, seed: Number };

/** Names that the server answers to; none while it loads. */
let names = [];
/** What is shown of each. */
let texts = [];

/** The model that is asked; empty while none is known. */
export const model = () => (names.length > 1 ? $("models").value : (names[0] ?? ""));
export const several = () => names.length > 1;

/** Ask which models there are. Where there are several, one can be chosen. */
export async function lookAtModels() {
  let found;
  try {
    found = (await (await ask("/v1/models", { signal: AbortSignal.timeout(10000) })).json()).data;
  } catch {
    return;  // The state of the machine says what is wrong.
  }
  const shown = found.map((one) => (one.fault ? `${one.id} (its last load has failed)` : one.id));
  if (shown.join("\n") === texts.join("\n")) return;
  const chosen = model() || keptSettings(SETTINGS).model;
  names = found.map((one) => one.id);
  texts = shown;
  $("models").replaceChildren(...names.map((name, at) => make("option", { value: name, textContent: texts[at] })));
  if (names.includes(chosen)) $("models").value = chosen;
  $("models").hidden = !several();
  $("model").hidden = several();
  $("model").textContent = names[0] ?? "";
}

/** As they stand in the form; what is empty is the server's to choose. Null if something is no number that it takes. */
export function settings() {
  const fields = {};
  for (const [name, kind] of Object.entries(FIELDS)) {
    const field = $(name);
    if (!field.checkValidity()) {
      tell(`${field.labels[0].firstChild.textContent.trim()}: ${field.validationMessage}`);
      return null;
    }
    if (field.value.trim() !== "") fields[name] = kind(field.value);
  }
  return fields;
}

function keepAll() {
  keepSettings(SETTINGS, { ...Object.fromEntries(Object.keys(FIELDS).map((name) => [name, $(name).value])), model: model() });
}

$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("input", () => {
  keepAll();
  tell("");
});
$("models").addEventListener("change", keepAll);
for (const [name, value] of Object.entries(keptSettings(SETTINGS))) {
  if (name in FIELDS) $(name).value = value;
}
