// Asks the server, with the key where there is one.

import { $ } from "./dom.js";

const KEY = "penstock.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  let message = `the server answers with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* It is not the API that has answered. */ }
  if (answer.status === 401) askForKey(Boolean(key));
  throw new Refused(answer.status, message);
}

export function post(path, body, signal) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
}

function askForKey(wrong) {
  if ($("ask-key").open) return;
  $("key-text").textContent = (wrong ? "This key is not one of the server’s. " : "This server asks for a key. ") + "It is kept until this tab is closed.";
  $("ask-key").showModal();
}

/** Call `then` after a key was given. */
export function whenKeyed(then) {
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, $("key").value.trim());
    $("key").value = "";
    $("ask-key").close();
    then();
  });
}

/** Yield events of a stream, as what JSON they hold, until the last. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}
