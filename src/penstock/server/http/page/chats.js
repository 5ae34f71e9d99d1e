// Conversations, as trees of turns, and how they are kept in this browser: each by itself, so that two tabs do not undo each
// other's. An edited message or another answer is one more child of the same turn; `at` is the turn at the end of what is shown.

import { newId } from "./dom.js";

const CHAT = "penstock.chat.";
/** Characters of all conversations that are kept; browsers hold some five million for a site. */
const ROOM = 4500000;
const ROLES = ["system", "user", "assistant"];

/** What the parts of the page share. live: the answer under way: its chat, its turn, what ends it; one at a time. */
export const now = { chats: [], chat: null, live: null };

// ---- a conversation

export function begun() {
  return { id: newId(), when: Date.now(), title: "", turns: [], at: null };
}

/** Turns from the first to the one at the end of what is shown. */
export function path(chat) {
  const places = new Map(chat.turns.map((turn) => [turn.id, turn])), found = [];
  for (let turn = places.get(chat.at); turn; turn = places.get(turn.parent)) found.push(turn);
  return found.reverse();
}

export function add(chat, turn, parent = chat.at) {
  const added = { id: newId(), parent, ...turn };
  chat.turns.push(added);
  chat.at = added.id;
  chat.when = Date.now();
  return added;
}

/** The turns in whose place this one stands, in the order in which they were made. */
export const siblings = (chat, turn) => chat.turns.filter((one) => one.parent === turn.parent);

/** Show this turn, and what was said last behind it. */
export function turnTo(chat, turn) {
  for (let next = turn; next; next = chat.turns.findLast((one) => one.parent === chat.at)) chat.at = next.id;
}

export function title(chat) {
  if (chat.title) return chat.title;
  const first = chat.turns.find((turn) => turn.role === "user");
  return first ? (first.content.trim() || first.files?.[0]?.name || "").replace(/\s+/g, " ").slice(0, 80) : "";
}

/** Attached files stand before the message, each fenced by more backticks than it has. */
export function contentOf(turn) {
  const files = (turn.files ?? []).map(({ name, text }) => {
    const fence = "`".repeat(Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length)) + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...files, ...(turn.content.trim() || !files.length ? [turn.content] : [])].join("\n\n");
}

/** The conversation up to a turn, as the API takes it. A question that got no answer is asked anew with the next one. */
export function messagesOf(turns, system = "") {
  const told = turns.filter((turn) => turn.content || turn.files?.length).map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  return system && told[0]?.role !== "system" ? [{ role: "system", content: system }, ...told] : told;
}

// ---- what is kept

function stored(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

export function keptSettings(key) {
  const found = stored(key);
  return found && typeof found === "object" ? found : {};
}

export function keepSettings(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch { /* Then they hold for as long as the page is open. */ }
}

export function storedChats() {
  const found = [];
  for (let at = 0; at < localStorage.length; at += 1) {
    const key = localStorage.key(at), chat = key.startsWith(CHAT) ? taken(stored(key)) : null;
    if (chat && chat.turns.length) found.push(chat);
  }
  return found.sort((one, other) => other.when - one.when);
}

/** A conversation of what was kept or comes from a file, with nothing in it but what belongs there; null if it is none. Once turns had no parents: they stood in a row. */
export function taken(raw) {
  if (!raw || typeof raw !== "object" || !Array.isArray(raw.turns)) return null;
  const chat = { id: /^\w{1,64}$/.test(raw.id) ? raw.id : newId(), when: Number(raw.when) || Date.now(), title: textOf(raw.title).slice(0, 200), turns: [], at: null };
  const ids = new Set();
  for (const one of raw.turns) {
    if (!one || typeof one !== "object" || !ROLES.includes(one.role)) continue;
    const turn = { id: typeof one.id === "string" && one.id && !ids.has(one.id) ? one.id : newId(), parent: null, role: one.role, content: textOf(one.content) };
    turn.parent = one.id === undefined ? chat.at : ids.has(one.parent) ? one.parent : null;
    for (const name of ["reasoning", "note", "fault", "model"]) if (one[name]) turn[name] = textOf(one[name]);
    if (one.thought > 0) turn.thought = Number(one.thought);
    if (one.open) turn.open = true;
    const files = Array.isArray(one.files) ? one.files.filter((file) => file && typeof file === "object") : [];
    if (files.length) turn.files = files.map((file) => ({ name: textOf(file.name), text: textOf(file.text), tokens: Number(file.tokens) || 0 }));
    ids.add(turn.id);
    chat.turns.push(turn);
    chat.at = turn.id;
  }
  if (ids.has(raw.at)) chat.at = raw.at;
  return chat;
}

const textOf = (value) => (typeof value === "string" ? value : "");

/**
 * Keep a conversation; those that have no turn yet are not. Say whether there was room. What another tab has added to it since is
 * kept too, and so is the end of an answer of which this tab knows the beginning: an answer that comes in this tab is `open` until it
 * has ended, and for others for as long.
 */
export function keep(chat) {
  if (!chat.turns.length || chat.deleted) return true;
  const theirs = new Map(taken(stored(CHAT + chat.id))?.turns.map((turn) => [turn.id, turn]));
  const { id, when, title: named, at } = chat;
  const mine = chat.turns.map((turn) => {
    const other = theirs.get(turn.id);
    theirs.delete(turn.id);
    return turn.open && turn !== now.live?.turn && other ? other : turn;
  });
  const turns = [...mine, ...theirs.values()];
  const text = JSON.stringify({ id, when, title: named, at, turns });
  try {
    if (text.length + taking(CHAT + id) > ROOM) throw new Error("no room");
    localStorage.setItem(CHAT + id, text);
    chat.unkept = false;
  } catch {
    chat.unkept = true;
  }
  return !chat.unkept;
}

/** Characters that all conversations but one take. */
function taking(but) {
  let sum = 0;
  for (let at = 0; at < localStorage.length; at += 1) {
    const key = localStorage.key(at);
    if (key.startsWith(CHAT) && key !== but) sum += localStorage.getItem(key).length;
  }
  return sum;
}

export function drop(chat) {
  chat.deleted = true;
  localStorage.removeItem(CHAT + chat.id);
  now.chats = now.chats.filter((other) => other !== chat);
}

export const isChat = (key) => key === null || key.startsWith(CHAT);

// ---- files of conversations

/** What a file has of a conversation: the messages that are shown, as the API takes them, and beside them all that a later import needs. */
function exported(chat, system) {
  const { id, when, at, turns } = chat;
  return { title: title(chat), messages: messagesOf(path(chat), system), penstock: { id, when, title: chat.title, at, turns } };
}

export function exportOf(chats, system) {
  const found = chats.map((chat) => exported(chat, system));
  return JSON.stringify(found.length === 1 ? found[0] : found, null, 1);
}

/** Conversations of a file: of this page's, or with OpenAI's messages. Raise Error with what is wrong. */
export function importOf(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch {
    throw new Error("is no JSON");
  }
  const many = Array.isArray(read) && !read.every((one) => one?.role) ? read : [read];
  const chats = many.map((one) => taken(one?.penstock) ?? ofMessages(Array.isArray(one) ? one : one?.messages, one?.title)).filter((chat) => chat?.turns.length);
  if (!chats.length) throw new Error("has no conversation: messages with a role and text are looked for");
  return chats;
}

function ofMessages(messages, named) {
  if (!Array.isArray(messages)) return null;
  const chat = { ...begun(), title: textOf(named).slice(0, 200) };
  for (const one of messages) {
    const role = one?.role === "developer" ? "system" : one?.role;
    if (!ROLES.includes(role)) continue;
    const parts = Array.isArray(one.content) ? one.content.map((part) => textOf(part?.text)).join("") : textOf(one.content);
    const reasoning = textOf(one.reasoning_content);
    add(chat, { role, content: parts, ...(reasoning ? { reasoning } : {}) });
  }
  return chat;
}
