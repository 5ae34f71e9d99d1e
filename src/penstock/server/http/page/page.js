// The chat, and the machine beside it. What comes from the model or the server becomes text nodes and nothing else.

const $ = (id) => document.getElementById(id);

/** A new element: properties as they are named in the DOM, children as nodes or text. */
function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// ---- the server

const KEY = "penstock.key";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
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

function askForKey(wrong) {
  if ($("ask-key").open) return;
  $("key-text").textContent = (wrong ? "This key is not one of the server’s. " : "This server asks for a key. ") + "It is kept until this tab is closed.";
  $("ask-key").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  $("ask-key").close();
  $("say").focus();
  look();
});

/** Events of a stream, as what JSON they hold, until the last. */
async function* eventsOf(answer) {
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

// ---- what is kept in this browser: each conversation by itself, so that two tabs do not undo each other's

const CHAT = "penstock.chat.", SETTINGS = "penstock.settings";
const FIELDS = { system: String, temperature: Number, top_p: Number, max_tokens: Number, seed: Number };

function stored(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

function store(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    tell("The browser has no room left for conversations; delete some.");
  }
}

function storedChats() {
  const found = [];
  for (let at = 0; at < localStorage.length; at += 1) {
    const key = localStorage.key(at);
    const chat = key.startsWith(CHAT) ? stored(key) : null;
    if (chat && Array.isArray(chat.turns)) found.push(chat);
  }
  return found.sort((one, other) => other.when - one.when);
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Those that have no turn yet are not kept. */
function keep(chat) {
  if (chat.turns.length && !chat.deleted) store(CHAT + chat.id, { id: chat.id, when: chat.when, turns: chat.turns });
}

let chats = storedChats();
let chat = chats[0] ?? begun();
/** The answer under way: its chat, its turn, what ends it. One at a time. */
let live = null;

function begun() {
  return { id: newId(), when: Date.now(), turns: [] };
}

function title(one) {
  const first = one.turns.find((turn) => turn.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 80) : "";
}

// ---- conversations

function showChats() {
  $("list").replaceChildren(...chats.map((one) => {
    const open = make("button", { type: "button", className: "open", textContent: title(one) });
    open.addEventListener("click", () => choose(one));
    const item = make("li", { className: one === chat ? "current" : "" }, open);
    if (one === chat) open.setAttribute("aria-current", "true");
    const remove = make("button", { type: "button", className: "delete", textContent: "✕", title: "Delete" });
    remove.setAttribute("aria-label", `Delete “${title(one)}”`);
    remove.addEventListener("click", () => forget(one));
    item.append(remove);
    return item;
  }));
}

function choose(one) {
  chat = one;
  showChats();
  showThread();
  showPanel(null);
  $("say").focus();
}

function forget(one) {
  if (!confirm(`Delete “${title(one)}”?`)) return;
  if (live?.chat === one) live.ended.abort();
  one.deleted = true;
  localStorage.removeItem(CHAT + one.id);
  chats = chats.filter((other) => other !== one);
  if (chat === one) {
    chat = chats[0] ?? begun();
    showThread();
  }
  showChats();
  ($("list").querySelector(".current .open") ?? $("new")).focus();
}

$("new").addEventListener("click", () => choose(chat.turns.length ? begun() : chat));

window.addEventListener("storage", (event) => {
  if (live || (event.key !== null && !event.key.startsWith(CHAT))) return;
  const now = chat.id;
  chats = storedChats();
  chat = chats.find((one) => one.id === now) ?? (chat.turns.length ? begun() : chat);
  showChats();
  showThread();
});

// ---- turns

/** Paragraphs, and code between fences; a fence that is still open goes on to the end. */
function blocksOf(text) {
  const blocks = [];
  let lines = [], fence = "";
  const close = (kind) => {
    const body = kind === "pre" ? lines.join("\n") : lines.join("\n").trim();
    if (body || kind === "pre") blocks.push({ kind, text: body });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1] ?? "";
    if (fence) {
      if (mark[0] === fence[0] && mark.length >= fence.length && line.trim() === mark) {
        close("pre");
        fence = "";
      } else {
        lines.push(line);
      }
    } else if (mark) {
      close("p");
      fence = mark;
    } else if (line.trim() === "") {
      close("p");
    } else {
      lines.push(line);
    }
  }
  close(fence ? "pre" : "p");
  return blocks;
}

/** Bring a body up to date; what has not changed stays the node that it is, and what is selected there stays so. */
function fill(body, text) {
  const blocks = blocksOf(text);
  blocks.forEach(({ kind, text: inside }, at) => {
    let node = body.children[at];
    if (node?.localName !== kind) {
      const fresh = make(kind);
      if (kind === "pre") fresh.append(make("code"));
      if (node) node.replaceWith(fresh);
      else body.append(fresh);
      node = fresh;
    }
    if (kind === "pre") {
      node.tabIndex = 0;
      node = node.firstChild;
    }
    if (node.textContent !== inside) node.textContent = inside;
  });
  while (body.children.length > blocks.length) body.lastElementChild.remove();
}

/** Show what a turn has of reasoning, before its body: open for as long as there is nothing else to read. */
function showReasoning(node, turn) {
  let box = node.querySelector(".reasoning");
  if (!turn.reasoning) return;
  if (!box) {
    const open = live?.turn === turn && !turn.content;
    box = make("details", { className: "reasoning", open }, make("summary", { textContent: "Reasoning" }), make("p"));
    node.querySelector(".body").before(box);
  }
  if (box.lastElementChild.textContent !== turn.reasoning) box.lastElementChild.textContent = turn.reasoning;
}

function turnNode(turn, last) {
  const body = make("div", { className: "body" });
  const who = make("span", { className: "unseen", textContent: turn.role === "user" ? "You: " : "Answer: " });
  const node = make("article", { className: `turn ${turn.role}` }, who, body);
  fill(body, turn.content);
  showReasoning(node, turn);
  if (turn.role === "assistant") {
    const busy = live?.turn === turn, under = make("div", { className: "under" });
    node.setAttribute("aria-busy", String(busy));
    if (!busy) {
      if (turn.fault) under.append(make("span", { className: "fault", textContent: turn.fault }));
      else if (turn.note) under.append(make("span", { textContent: turn.note }));
      if (last && !live) {
        const again = make("button", { type: "button", id: "again", textContent: "Regenerate" });
        again.addEventListener("click", regenerate);
        under.append(again);
      }
    }
    node.append(under);
  }
  return node;
}

function showThread() {
  const { turns } = chat, thread = $("thread");
  thread.replaceChildren(...turns.map((turn, at) => turnNode(turn, at === turns.length - 1)));
  if (!turns.length) thread.append(make("p", { className: "blank", textContent: "Ask something. Conversations stay in this browser." }));
  thread.scrollTop = thread.scrollHeight;
  follows = true;
  $("send").hidden = Boolean(live);
  $("stop").hidden = !live;
}

let drawn = false;
/** Whether the end of the conversation is looked at: then that is kept in sight. */
let follows = true;

$("thread").addEventListener("scroll", () => {
  const thread = $("thread");
  follows = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 80;
});

/** With the next frame, if not already then. */
function redraw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    const body = live?.chat === chat ? $("thread").lastElementChild?.querySelector(".body") : null;
    if (!body) return;
    const thread = $("thread");
    fill(body, live.turn.content);
    showReasoning(thread.lastElementChild, live.turn);
    if (follows) thread.scrollTop = thread.scrollHeight;
  });
}

// ---- answers

function tell(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** As they stand in the form; what is empty is the server's to choose. Null if something is no number that it takes. */
function settings() {
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

async function answer() {
  const asked = settings();
  if (asked === null || live) return;
  const { system, ...sampling } = asked;
  // A question that got no answer is asked anew with the next one.
  const told = chat.turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  const messages = system ? [{ role: "system", content: system }, ...told] : told;
  const turn = { role: "assistant", content: "", reasoning: "", note: "", fault: "" };
  live = { chat, turn, ended: new AbortController() };
  const own = live;
  chat.turns.push(turn);
  chat.when = Date.now();
  if (!chats.includes(chat)) chats = [chat, ...chats];
  keep(chat);
  tell("");
  showChats();
  showThread();
  $("say").focus();
  const begin = performance.now();
  let first = 0, usage = null, reason = null;
  try {
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...sampling };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: own.ended.signal };
    for await (const event of eventsOf(await ask("/v1/chat/completions", options))) {
      if (event.error) throw new Refused(200, event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      first ||= performance.now();
      turn.content += choice.delta.content ?? "";
      turn.reasoning += choice.delta.reasoning_content ?? "";
      redraw();
    }
    if (reason === null) turn.fault = "The connection has ended before the answer did.";
  } catch (fault) {
    if (fault.name === "AbortError") turn.note = "Stopped.";
    else turn.fault = fault instanceof Refused ? `Not answered: ${fault.message}.` : "The server cannot be reached.";
  }
  if (reason !== null && usage) {
    const count = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
    const each = count > 1 && seconds > 0.05 ? `, ${number((count - 1) / seconds)} a second` : "";
    const found = usage.prompt_tokens_details?.cached_tokens ?? 0;
    turn.note = `${number(count)} tokens${each}; the first after ${number((first - begin) / 1000)} s` + (found ? `, ${number(found)} of ${number(usage.prompt_tokens)} of the prompt found` : "") + (reason === "length" ? "; cut at the limit" : "") + ".";
  }
  live = null;
  keep(own.chat);
  const focused = document.activeElement === $("stop");
  showThread();
  if (focused) $("say").focus();
}

function regenerate() {
  if (live || chat.turns.at(-1)?.role !== "assistant") return;
  if (settings() === null) return;
  chat.turns.pop();
  answer();
}

function stop() {
  live?.ended.abort();
}

// ---- the form

let model = "";

function grow() {
  const field = $("say");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

function send() {
  const content = $("say").value;
  if (live || !content.trim() || settings() === null) return;
  if (!model) {
    tell("The model is not there yet.");
    return;
  }
  $("say").value = "";
  grow();
  chat.turns.push({ role: "user", content });
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
  if (event.key !== "Escape" || $("ask-key").open) return;
  if (live) stop();
  else if (document.body.dataset.panel) showPanel(null);
});

$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings").addEventListener("input", () => {
  store(SETTINGS, Object.fromEntries(Object.keys(FIELDS).map((name) => [name, $(name).value])));
  tell("");
});
for (const [name, value] of Object.entries({ max_tokens: "512", ...stored(SETTINGS) })) {
  if (name in FIELDS) $(name).value = value;
}

// ---- panels, where there is no room for all

function showPanel(name) {
  const before = document.body.dataset.panel;
  if (name) document.body.dataset.panel = name;
  else delete document.body.dataset.panel;
  for (const one of ["chats", "machine"]) $(`show-${one}`).setAttribute("aria-expanded", String(one === name));
  if (!name && before) $(`show-${before}`).focus();
}

for (const one of ["chats", "machine"]) {
  $(`show-${one}`).addEventListener("click", () => showPanel(document.body.dataset.panel === one ? null : one));
}

// ---- numbers

function number(value) {
  return value.toLocaleString("en", value >= 100 || Number.isInteger(value) ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
}

function scaled(value, step, units) {
  let at = 0;
  while (Math.abs(value) >= step && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  const digits = at === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[at]}`;
}

/** Memory in binary units, rates in decimal ones, as everywhere in penstock. */
const size = (bytes) => scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const speed = (rate) => scaled(rate, 1000, ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"]);
const share = (part) => `${(part * 100).toFixed(0)}%`;

function duration(seconds) {
  const whole = Math.round(seconds), two = (count) => String(count).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

// ---- the machine

const PARTS = {
  weights: "weights", ring: "in transit", beside: "host’s part", kv: "KV in use", kept: "KV kept",
  empty: "KV empty", recurrent: "state", activations: "activations", other: "other", free: "free",
};
const TIERS = { device: "Device", host: "Host memory", disk: "Disk" };

/** Built once for each set of names, and then only filled: what does not change is not announced, selected text stays selected. */
class Bars {
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

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

class TierView {
  constructor(name) {
    this.of = make("span", { className: "of" });
    this.bars = new Bars();
    this.node = make("div", { className: "tier" }, make("div", { className: "head" }, make("span", { className: "name", textContent: TIERS[name] }), this.of), this.bars.node);
  }

  show(tier) {
    const parts = tier.parts.map(({ what, bytes }) => ({ kind: what, name: PARTS[what], amount: bytes, written: size(bytes) }));
    write(this.of, tier.bytes ? size(tier.bytes) : "not used");
    this.bars.node.hidden = !parts.length;
    this.bars.show(parts, tier.bytes, parts.map((part) => `${part.name} ${part.written}`).join(", "));
  }
}

class LinkView {
  constructor(name) {
    this.now = make("span");
    this.top = make("span");
    this.bar = make("div", { className: "bar" }, make("span", { className: "weights" }), make("span", { className: "kv" }));
    this.bar.setAttribute("aria-hidden", "true");
    this.note = make("p", { className: "note" });
    this.node = make("div", { className: "link" }, make("span", { className: "arrow", textContent: "↑", ariaHidden: "true" }), make("div", { className: "wide" }, this.now, this.top), this.bar, this.note);
    this.node.setAttribute("role", "group");
    this.node.setAttribute("aria-label", name);
  }

  show(link) {
    const all = link.weights + link.kv;
    write(this.now, speed(all));
    write(this.top, link.ceiling ? `${share(all / link.ceiling)} of ${speed(link.ceiling)} measured` : "no ceiling measured");
    this.bar.hidden = !link.ceiling;
    [link.weights, link.kv].forEach((rate, at) => { this.bar.children[at].style.width = `${Math.min(100, link.ceiling ? (100 * rate) / link.ceiling : 0)}%`; });
    const notes = [];
    if (link.kv) notes.push(`${speed(link.kv)} of it KV`);
    if (link.ceiling) notes.push(`arithmetic waited ${share(link.waited)}`);
    write(this.note, notes.join("; "));
    this.note.hidden = !notes.length;
  }
}

const views = { device: new TierView("device"), "host to device": new LinkView("Host to device"), host: new TierView("host"), "disk to host": new LinkView("Disk to host"), disk: new TierView("disk") };
$("tiers").append(...Object.values(views).map((view) => view.node));
const cache = new Bars();
$("cache").append(cache.node);

function showState(state) {
  model = state.model;
  write($("model"), state.model);
  $("state").className = state.open ? "state good" : "state bad";
  write($("state"), state.open ? `${state.family}, ${state.layers} layers, ${state.format ? `${state.format} weights, ` : ""}${state.dtype} on ${state.device}; up to ${number(state.longest)} tokens` : "Takes no more requests.");
  write($("running"), number(state.running));
  write($("waiting"), number(state.waiting));
  write($("rate"), number(state.output_rate));
  showPrompt(state.prompt);
  for (const tier of state.tiers) views[tier.tier].show(tier);
  for (const name of ["host to device", "disk to host"]) {
    const link = state.links.find((one) => one.link === name);
    views[name].node.hidden = !link;
    if (link) views[name].show(link);
  }
  showCache(state.cache);
  showPlan(state.plan, state.missed);
  showExperts(state.experts, state.computed_rate);
  $("gauges").hidden = false;
}

function showPrompt(prompt) {
  $("prompt").max = prompt?.length ?? 1;
  $("prompt").value = prompt?.reached ?? 0;
  if (!prompt) {
    write($("prompt-text"), "none is being computed");
    return;
  }
  const flow = prompt.rate ? `, ${number(prompt.rate)} tokens/s` : "", left = prompt.left === null ? "" : `, ${duration(prompt.left)} left`;
  write($("prompt-text"), `${number(prompt.reached)} of ${number(prompt.length)} tokens${flow}${left}`);
}

function showCache(found) {
  const all = found.computed + found.device + found.host + found.disk;
  const parts = [
    ["computed", "computed", found.computed], ["on-device", "from device", found.device],
    ["on-host", "from host", found.host], ["on-disk", "from disk", found.disk],
  ].map(([kind, name, amount]) => ({ kind, name, amount, written: number(amount) }));
  cache.show(parts, all, `of ${number(all)} prompt tokens ${parts.map((part) => `${part.written} ${part.name}`).join(", ")}`);
}

function showPlan(plan, missed) {
  const rows = [["rest on the device", size(plan.device)], ["rest on the host", size(plan.host)], ["rest on disk", size(plan.disk)]];
  let last = "All stay on the device; nothing streams.";
  if (plan.binding) {
    rows.push(["copied in a pass", size(plan.copied)]);
    if (plan.read) rows.push(["read in a pass", size(plan.read)]);
    const predicted = plan.decode_predicted ? `, predicted ${number(plan.decode_predicted)}` : "";
    rows.push(["a decode pass takes", `${plan.decode_seconds ? `${number(plan.decode_seconds)} s` : "–"}${predicted}`]);
    if (plan.prefill_seconds) rows.push(["a prompt's pass takes", `${number(plan.prefill_seconds)} s`]);
    last = `Bound by ${{ disk: "the disk", link: "the link from host to device", compute: "arithmetic" }[plan.binding] ?? plan.binding}.`;
  }
  if (missed.choices) {
    rows.push(["KV blocks read", `${number(100 * missed.read)} %`], ["attention missed, at most", `${number(100 * missed.mean)} %`]);
  }
  showRows($("plan"), rows, "bound", last);
}

/** Names and values, and a line below them that has an unseen name; what has not changed stays as it is. */
function showRows(node, rows, name, last) {
  const said = JSON.stringify([rows, last]);
  if (node.dataset.said === said) return;
  node.dataset.said = said;
  const nodes = rows.flatMap(([one, value]) => [make("dt", { textContent: one }), make("dd", { textContent: value })]);
  node.replaceChildren(...nodes, make("dt", { className: "unseen", textContent: name }), make("dd", { className: "wide", textContent: last }));
}

// ---- experts

const sources = new Bars();
$("sources").append(sources.node);
/** What /experts said last. */
let map = null;

/** found: null where all experts rest on the device. rate: tokens a second that are computed. */
function showExperts(found, rate) {
  $("experts").hidden = !found;
  if (!found) return;
  const asked = found.recent_asked, missed = asked - found.recent_hit, all = found.device + found.host + found.disk;
  const old = found.age >= 2 ? ` These are counts of ${number(Math.round(found.age))} s ago.` : "";
  showRows($("expert-numbers"), [
    ["asked for lately", asked ? number(asked) : "–"],
    ["hits, on the device", asked ? `${number(found.recent_hit)} (${thousandths(1000 * found.recent_hit / asked)})` : "–"],
    ["misses, fetched", asked ? number(missed) : "–"],
    ["fetched per token", rate && asked ? size(found.rate / rate) : "–"],
    ["fetched since the start", size(found.copied)],
    ...(found.read ? [["of that from disk", size(found.read)]] : []),
  ], "where", `Of ${number(all)} asked for since the start:${old}`);
  const parts = [["on-device", "on the device", found.device], ["on-host", "in host memory", found.host], ["on-disk", "on disk", found.disk]]
    .map(([kind, name, amount]) => ({ kind, name, amount, written: number(amount) }));
  sources.show(parts, all, `of ${number(all)} experts asked for, ${parts.map((part) => `${part.written} ${part.name}`).join(", ")}`);
}

const WHERE = { D: ["--weights", "on the device"], H: ["--kv", "in host memory"], S: ["--activations", "on disk"] };
/** Experts that nothing asks for are seen as faintly as this; those on the device are to be told from others. */
const FAINT = { D: 0.3, H: 0.08, S: 0.08 };

function showMap(found) {
  map = found;
  const { layers } = map, canvas = $("heat"), columns = Math.max(0, ...layers.map((one) => one.where.length));
  if (canvas.width !== columns || canvas.height !== layers.length) {
    canvas.width = columns;
    canvas.height = layers.length;
    canvas.style.height = `${layers.length * Math.max(3, Math.min(10, Math.floor(160 / layers.length)))}px`;
    $("layer").replaceChildren(...layers.map((one) => make("option", { value: String(one.layer), textContent: String(one.layer) })));
  }
  const style = getComputedStyle(canvas), pen = canvas.getContext("2d");
  const colours = Object.fromEntries(Object.entries(WHERE).map(([where, [name]]) => [where, style.getPropertyValue(name)]));
  const most = Math.max(1, ...layers.map((one) => Math.max(...one.asked)));
  pen.clearRect(0, 0, columns, layers.length);
  layers.forEach((one, row) => one.asked.forEach((asked, column) => {
    const where = one.where[column];
    pen.fillStyle = colours[where];
    pen.globalAlpha = FAINT[where] + (1 - FAINT[where]) * Math.sqrt(asked / most);
    pen.fillRect(column, row, 1, 1);
  }));
  const counts = Object.keys(WHERE).map((where) => [where, layers.reduce((sum, one) => sum + one.where.split(where).length - 1, 0)]);
  const there = counts.filter(([, count]) => count).map(([where, count]) => `${number(count)} ${WHERE[where][1]}`).join(", ");
  canvas.setAttribute("aria-label", `Heat map: ${layers.length} layers of up to ${columns} experts; ${there}. The stronger a colour, the more often an expert is asked for. Below is a table of each layer.`);
  if (!canvas.dataset.at) write($("heat-text"), `Rows are layers, columns experts; the stronger, the more often asked for, at most in ${thousandths(most)} of recent steps. Point at one.`);
  else point();
  showLayer();
}

const thousandths = (count) => `${(count / 10).toFixed(1)}%`;

function showLayer() {
  const one = map?.layers.find((layer) => String(layer.layer) === $("layer").value);
  if (!one) return;
  write($("layer-title"), `Layer ${one.layer}: share of recent steps that asked for each expert`);
  const order = one.asked.map((_, expert) => expert).sort((a, b) => one.asked[b] - one.asked[a] || a - b), rows = $("layer-rows");
  while (rows.children.length > order.length) rows.lastElementChild.remove();
  while (rows.children.length < order.length) rows.append(make("tr", {}, make("th", { scope: "row" }), make("td"), make("td")));
  order.forEach((expert, at) => [String(expert), thousandths(one.asked[expert]), WHERE[one.where[expert]][1]].forEach((text, column) => write(rows.children[at].children[column], text)));
}

/** Say which expert the pointer is at. */
function point() {
  const [row, expert] = $("heat").dataset.at.split(" ").map(Number), one = map?.layers[row];
  if (one && expert < one.where.length) write($("heat-text"), `Layer ${one.layer}, expert ${expert}: asked for in ${thousandths(one.asked[expert])} of recent steps, ${WHERE[one.where[expert]][1]}.`);
}

$("heat").addEventListener("pointermove", (event) => {
  const box = $("heat").getBoundingClientRect(), within = (part, count) => Math.max(0, Math.min(count - 1, Math.floor(part * count)));
  $("heat").dataset.at = `${within((event.clientY - box.top) / box.height, $("heat").height)} ${within((event.clientX - box.left) / box.width, $("heat").width)}`;
  point();
});
$("heat").addEventListener("pointerleave", () => { delete $("heat").dataset.at; });
$("layer").addEventListener("change", showLayer);
$("map").addEventListener("toggle", lookAtExperts);

/** Asked for only while it is seen. */
async function lookAtExperts() {
  if ($("experts").hidden || !$("map").open) return;
  try {
    showMap(await (await ask("/experts", { signal: AbortSignal.timeout(10000) })).json());
  } catch { /* `look` says what is wrong. */ }
}

let looking = false;

async function look() {
  if (looking || document.hidden || $("ask-key").open) return;
  looking = true;
  let state;
  try {
    state = await (await ask("/state", { signal: AbortSignal.timeout(10000) })).json();
  } catch (fault) {
    $("state").className = "state bad";
    const known = fault instanceof Refused;
    write($("state"), known && fault.status === 503 ? "The model is being loaded, or the server ends." : known ? `${fault.message}.` : "The server cannot be reached.");
    $("gauges").hidden = true;
    return;
  } finally {
    looking = false;
  }
  showState(state);
  await lookAtExperts();
}

showChats();
showThread();
look();
setInterval(look, 1000);
document.addEventListener("visibilitychange", look);
$("say").focus();
