// The list of conversations, and the panels beside what is shown.

import { begun, drop, exportOf, importOf, isChat, keep, now, storedChats, taken, title } from "./chats.js";
import { $, button, download, make, tell } from "./dom.js";
import { counted } from "./numbers.js";
import { changed, stop } from "./answers.js";
import { forgetEditing, keepOrTell, showThread } from "./thread.js";

changed.chats = showChats;

export function showChats() {
  $("list").replaceChildren(...now.chats.map((one) => {
    const name = title(one), open = button(name, () => choose(one), { className: "open", title: name });
    const item = make("li", { className: one === now.chat ? "current" : "" }, open);
    if (one === now.chat) open.setAttribute("aria-current", "true");
    item.append(
      small("✎", "Rename", one, rename), small("⤓", "Export", one, () => save([one])), small("✕", "Delete", one, forget),
    );
    return item;
  }));
  $("export-all").disabled = !now.chats.length;
}

function small(sign, label, chat, does) {
  return button(sign, () => does(chat), { className: label.toLowerCase(), title: label, ariaLabel: `${label} “${title(chat)}”` });
}

export function choose(one) {
  now.chat = one;
  forgetEditing();
  showChats();
  showThread();
  showPanel(null);
  $("say").focus();
}

function rename(chat) {
  const named = prompt("Name of this conversation", title(chat));
  if (named === null) return;
  chat.title = named.trim().slice(0, 200);
  keepOrTell(chat);
  showChats();
}

function forget(one) {
  if (!confirm(`Delete “${title(one)}”?`)) return;
  if (now.live?.chat === one) stop();
  drop(one);
  tell("");
  if (now.chat === one) {
    now.chat = now.chats[0] ?? begun();
    forgetEditing();
    showThread();
  }
  showChats();
  ($("list").querySelector(".current .open") ?? $("new")).focus();
}

// ---- files

/** Give conversations as a file, with the system prompt that they are asked with. */
function save(chats) {
  const day = new Date().toISOString().slice(0, 10);
  const name = chats.length === 1 ? title(chats[0]).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) : "";
  download(`penstock-${name || "conversations"}-${day}.json`, exportOf(chats, $("system").value.trim()));
}

/** Add what a file has. A conversation that is here already becomes a second one, unless it is the same. */
async function load(file) {
  let found;
  try {
    found = importOf(await file.text());
  } catch (fault) {
    tell(`${file.name} ${fault.message}.`);
    return;
  }
  const text = (one) => JSON.stringify([one.title, taken(one).turns]), same = (one, other) => text(one) === text(other);
  const fresh = found.filter((one) => !now.chats.some((other) => same(one, other)));
  let lost = 0;
  for (const chat of fresh) {
    if (now.chats.some((other) => other.id === chat.id)) chat.id = begun().id;
    now.chats = [chat, ...now.chats];
    if (!keep(chat)) lost += 1;
  }
  now.chats.sort((one, other) => other.when - one.when);
  choose(fresh[0] ?? now.chats.find((other) => same(found[0], other)));
  tell(lost ? `This browser has no room for ${counted(lost, "conversation")} of ${file.name}: they are lost when the page is closed. Delete others, and import again.` : fresh.length ? "" : `All conversations of ${file.name} are here already.`);
}

$("new").addEventListener("click", () => choose(now.chat.turns.length ? begun() : now.chat));
$("export-all").addEventListener("click", () => save(now.chats));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", async () => {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (file) await load(file);
});

/** Whether another tab has changed what is kept, while an answer comes in this one. */
let stale = false;

window.addEventListener("storage", (event) => {
  if (!isChat(event.key)) return;
  stale = true;
  if (!now.live) readAgain();
});
changed.ended = () => { if (stale) readAgain(); };

function readAgain() {
  stale = false;
  const { chat } = now, unkept = now.chats.filter((one) => one.unkept);
  const found = storedChats();
  now.chats = [...unkept, ...found.filter((one) => !unkept.some((other) => other.id === one.id))];
  const again = now.chats.find((one) => one.id === chat.id);
  // What this tab shows of a conversation is this tab's.
  if (again && again !== chat && again.turns.some((turn) => turn.id === chat.at)) again.at = chat.at;
  now.chat = again ?? (chat.turns.length ? begun() : chat);
  showChats();
  showThread(true);
}

window.addEventListener("pagehide", () => {
  if (!now.live) return;
  now.live.left = true;
  keep(now.live.chat);
});
window.addEventListener("pageshow", () => { if (now.live?.left) location.reload(); });
window.addEventListener("beforeunload", (event) => { if (now.chats.some((one) => one.unkept)) event.preventDefault(); });

// ---- panels, where there is no room for all

export function showPanel(name) {
  const before = document.body.dataset.panel;
  if (name) document.body.dataset.panel = name;
  else delete document.body.dataset.panel;
  for (const one of ["chats", "machine"]) $(`show-${one}`).setAttribute("aria-expanded", String(one === name));
  if (!name && before) $(`show-${before}`).focus();
}

for (const one of ["chats", "machine"]) {
  $(`show-${one}`).addEventListener("click", () => showPanel(document.body.dataset.panel === one ? null : one));
}
