// The chat, and the machine beside it.

import { answer, note, ready, stop } from "./answers.js";
import { clear, pending, reading } from "./attach.js";
import { add, begun, now, storedChats } from "./chats.js";
import { $, tell } from "./dom.js";
import { showChats, showPanel } from "./list.js";
import { look, watchState } from "./machine.js";
import { whenKeyed } from "./server.js";
import { lookAtModels, model } from "./settings.js";
import { leaveEditing, showThread } from "./thread.js";

const DRAFT = "penstock.draft";
/** Seconds between two looks at which models there are. */
const MODELS = 30;

function grow() {
  const field = $("say");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
  sessionStorage.setItem(DRAFT, field.value.slice(0, 100000));
}

function send() {
  const content = $("say").value, files = pending;
  if (reading) {
    tell("A file is still being read.");
    return;
  }
  if ((!content.trim() && !files.length) || !ready()) return;
  $("say").value = "";
  clear();
  grow();
  leaveEditing();
  add(now.chat, { role: "user", content, ...(files.length ? { files } : {}) });
  answer();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("say").addEventListener("input", grow);
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || $("ask-key").open) return;
  if (leaveEditing()) return;
  if (now.live) stop();
  else if (document.body.dataset.panel) showPanel(null);
});

whenKeyed(() => {
  $("say").focus();
  look();
  lookAtModels();
});
let asked = 0;
watchState((state) => {
  note(state);
  if (!state || (model() && performance.now() - asked < 1000 * MODELS)) return;
  asked = performance.now();
  lookAtModels();
});

now.chats = storedChats();
now.chat = now.chats[0] ?? begun();
$("say").value = sessionStorage.getItem(DRAFT) ?? "";
showChats();
showThread();
grow();
look();
setInterval(look, 1000);
document.addEventListener("visibilitychange", look);
$("say").focus();
