// The conversation that is shown: its turns, and what can be done with each.

import { chip } from "./attach.js";
import { add, keep, now, path, siblings, turnTo } from "./chats.js";
import { $, button, copy, make, tell, write } from "./dom.js";
import { Growing } from "./markdown.js";
import { took } from "./numbers.js";
import { several } from "./settings.js";

/** What answers a turn, and what answers in place of an answer; `answers.js` gives them. */
export const acts = { answer: null, retry: null };
/** What is edited: the turn's id, and its text and files as they are by now. */
let editing = null;
/** Whether the end of the conversation is looked at: then that is kept in sight. */
let follows = true;
/** 0, or 1 while something is being shown, or 2 if more has come since. */
let drawn = 0;

const NAMES = { user: "You", assistant: "Answer", system: "System prompt" };

/** Keep a conversation, and say so if there is no room. */
export function keepOrTell(chat) {
  if (keep(chat)) return;
  tell("This browser has no room for this conversation: it is lost when the page is closed. Export it, or delete others.");
}

/** Show the conversation, at its end, or where it was looked at to `stay`. Turns that are shown already keep their nodes: nothing is read out again, and what is selected or open stays so. */
export function showThread(stay = false) {
  const thread = $("thread"), turns = path(now.chat), top = thread.scrollTop;
  const shown = new Map([...thread.children].map((node) => [node.turn, node]));
  const nodes = turns.map((turn) => {
    const have = shown.get(turn);
    return have && !have.edited && editing?.id !== turn.id ? renewed(have) : turnNode(turn);
  });
  if (!turns.length) nodes.push(make("p", { className: "blank", textContent: "Ask something. Conversations stay in this browser." }));
  for (const node of [...thread.children]) if (!nodes.includes(node)) node.remove();
  let at = thread.firstChild;
  for (const node of nodes) {
    if (node === at) at = at.nextSibling;
    else thread.insertBefore(node, at);
  }
  if (stay) thread.scrollTop = top;
  else toEnd();
  showLive();
}

/** Show the conversation after an answer: at its end, if that was looked at. */
export const showEnded = () => showThread(!follows);

export function toEnd() {
  $("thread").scrollTop = $("thread").scrollHeight;
  follows = true;
  $("to-end").hidden = true;
}

/** What only is there while an answer comes. */
export function showLive() {
  $("send").hidden = Boolean(now.live);
  $("stop").hidden = $("live").hidden = !now.live;
  document.body.toggleAttribute("data-live", Boolean(now.live));
}

function turnNode(turn) {
  const node = make("article", { className: `turn ${turn.role}` }, make("h2", { className: "unseen", textContent: NAMES[turn.role] }));
  node.dataset.id = turn.id;
  node.turn = turn;
  node.edited = editing?.id === turn.id;
  if (node.edited) {
    node.append(editor(turn));
    return node;
  }
  const body = make("div", { className: "body" });
  node.append(body, make("div", { className: "under" }));
  if (turn.role === "assistant") {
    node.growing = new Growing(body);
  } else {
    if (turn.role === "system") body.append(make("p", { className: "who", textContent: NAMES.system }));
    if (turn.files) body.append(make("ul", { className: "files" }, ...turn.files.map((file) => attached(file))));
    if (turn.content || !turn.files) body.append(make("p", { className: "plain", textContent: turn.content }));
  }
  return renewed(node);
}

/** Bring a turn up to date: what it says, and what can be done with it. */
function renewed(node) {
  const { turn } = node, live = now.live?.turn === turn;
  if (node.growing && !node.whole) {
    node.growing.show(turn.content, !live);
    node.whole = !live;
  }
  if (node.growing) {
    node.setAttribute("aria-busy", String(live));
    showReasoning(node, turn);
  }
  node.lastElementChild.replaceWith(live ? make("div", { className: "under" }) : underOf(turn));
  return node;
}

function attached(file) {
  const item = chip(file), text = make("pre", { tabIndex: 0, textContent: file.text });
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", file.name);
  return make("li", {}, make("details", {}, make("summary", {}, ...item.childNodes), text));
}

/** Show what a turn has of reasoning, folded, before its body. */
function showReasoning(node, turn) {
  if (!turn.reasoning) return;
  let box = node.querySelector(".reasoning");
  if (!box) {
    box = make("details", { className: "reasoning" }, make("summary"), make("div", { className: "plain" }));
    node.querySelector(".body").before(box);
  }
  const thinking = now.live?.turn === turn && !turn.content, time = turn.thought ? ` for ${took(turn.thought)}` : "";
  write(box.firstElementChild, thinking ? "Thinking …" : `Thought${time}`);
  const text = box.lastElementChild.firstChild;
  if (text && turn.reasoning.startsWith(text.data)) text.appendData(turn.reasoning.slice(text.data.length));
  else box.lastElementChild.textContent = turn.reasoning;
}

/** What can be done with a turn, and what there is to say of it. */
function underOf(turn) {
  const under = make("div", { className: "under" }), others = siblings(now.chat, turn), at = others.indexOf(turn);
  if (others.length > 1) under.append(branches(turn, others, at));
  under.append(button("Copy", (event) => copy(turn.content, event.currentTarget), { className: "copy" }));
  under.append(button("Edit", () => edit(turn), { className: "edit", disabled: Boolean(now.live) }));
  if (turn.role === "assistant") under.append(button("Retry", () => acts.retry(turn), { className: "again", disabled: Boolean(now.live) }));
  else if (turn.role === "user" && turn.id === now.chat.at) under.append(button("Answer", () => acts.answer(), { className: "again", disabled: Boolean(now.live) }));
  const model = several() && turn.model ? `${turn.model}: ` : "";
  if (turn.fault) under.append(make("span", { className: "fault", textContent: turn.fault }));
  else if (turn.open) under.append(make("span", { className: "note", textContent: "The page was closed before the answer ended." }));
  else if (turn.note) under.append(make("span", { className: "note", textContent: model + turn.note }));
  return under;
}

function branches(turn, others, at) {
  const move = (by) => {
    turnTo(now.chat, others[at + by]);
    keepOrTell(now.chat);
    showThread(true);
    const shown = nodeOf(others[at + by]);
    (shown.querySelector(`.branches [data-by="${by}"]:not(:disabled)`) ?? shown.querySelector(".branches button:not(:disabled)")).focus();
  };
  const arrow = (sign, by, label) => {
    const node = button(sign, () => move(by), { title: label, ariaLabel: label, disabled: Boolean(now.live) || !others[at + by] });
    node.dataset.by = by;
    return node;
  };
  const node = make("span", { className: "branches" }, arrow("‹", -1, "Version before"), make("span", { textContent: `${at + 1}/${others.length}` }), arrow("›", 1, "Version after"));
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", `Version ${at + 1} of ${others.length}`);
  return node;
}

export const nodeOf = (turn) => $("thread").querySelector(`[data-id="${CSS.escape(turn.id)}"]`);

// ---- editing

function edit(turn) {
  if (now.live) return;
  editing = { id: turn.id, text: turn.content, files: turn.files ?? [] };
  showThread(true);
  const field = nodeOf(turn).querySelector("textarea");
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 2)}px`;
  field.focus();
}

export function leaveEditing() {
  if (!editing) return false;
  const { id } = editing;
  editing = null;
  showThread(true);
  nodeOf({ id })?.querySelector(".edit")?.focus();
  return true;
}

/** An edited message is asked anew; an edited answer stands as it is. Both leave what was there. */
function editor(turn) {
  const draft = editing, field = make("textarea", { value: draft.text, rows: 2, ariaLabel: `Edit: ${NAMES[turn.role]}` });
  const list = make("ul", { className: "files" });
  const fill = () => list.replaceChildren(...draft.files.map((file) => chip(file, () => {
    draft.files = draft.files.filter((one) => one !== file);
    fill();
    field.focus();
  })));
  fill();
  const done = () => {
    const { files } = draft;
    if (now.live || (!field.value.trim() && !files.length)) return;
    editing = null;
    add(now.chat, { role: turn.role, content: field.value, ...(files.length ? { files } : {}), ...(turn.role === "assistant" ? { note: "Edited." } : {}) }, turn.parent);
    keepOrTell(now.chat);
    if (turn.role === "user") acts.answer();
    else showThread(true);
  };
  const form = make("form", { className: "editor" }, list, field, make("div", { className: "row" },
    make("button", { type: "submit", className: "done", textContent: turn.role === "user" ? "Send" : "Save" }), button("Cancel", leaveEditing)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    done();
  });
  field.addEventListener("input", () => { draft.text = field.value; });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) done();
  });
  return form;
}

/** Forget that a turn is edited, as another conversation is shown. */
export function forgetEditing() {
  editing = null;
}

// ---- while it comes

/** Show what has come with the next frame, if not already then. At most a fifth of the time goes into that, so that the page stays quick however long an answer is. */
export function redraw() {
  if (drawn) {
    drawn = 2;
    return;
  }
  drawn = 1;
  const draw = () => {
    const begin = performance.now();
    drawBody();
    setTimeout(() => {
      const again = drawn > 1;
      drawn = 0;
      if (again) redraw();
    }, 4 * (performance.now() - begin));
  };
  requestAnimationFrame(draw);
}

function drawBody() {
  const turn = now.live?.turn, node = turn && now.live.chat === now.chat ? nodeOf(turn) : null;
  if (!node?.growing) return;
  node.growing.show(turn.content);
  showReasoning(node, turn);
  if (follows) $("thread").scrollTop = $("thread").scrollHeight;
}

$("thread").addEventListener("scroll", () => {
  const thread = $("thread");
  follows = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
  $("to-end").hidden = follows;
});
$("thread").addEventListener("click", (event) => {
  const asked = event.target.closest?.(".copy-code");
  if (asked) copy(asked.closest(".code").querySelector("code").textContent, asked);
});
$("to-end").addEventListener("click", () => {
  toEnd();
  $("say").focus();
});
