// The machine beside the chat, as /state tells of it.

import { Bars, showRows } from "./bars.js";
import { $, make, write } from "./dom.js";
import { lookAtExperts, showExperts } from "./experts.js";
import { duration, number, share, size, speed } from "./numbers.js";
import { Refused, ask } from "./server.js";

const PARTS = {
  weights: "weights", ring: "in transit", beside: "host’s part", kv: "KV in use", kept: "KV kept",
  empty: "KV empty", recurrent: "state", activations: "activations", other: "other", free: "free",
};
const TIERS = { device: "Device", host: "Host memory", disk: "Disk" };

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
  const none = !state.tiers.length;
  $("state").className = state.open ? "state good" : "state bad";
  write($("state"), state.open && none ? "No model is loaded; a request for one loads it." : state.open ? `${state.family}, ${state.layers} layers, ${state.format ? `${state.format} weights, ` : ""}${state.dtype} on ${state.device}; up to ${number(state.longest)} tokens` : "Takes no more requests.");
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
  showSpeculation(state.speculation);
  showPlan(state.plan, state.missed);
  showExperts(state.experts, state.computed_rate);
  showServed(state.models, state.model);
  $("gauges").hidden = none;
}

/** Models that are loaded as they are asked for; the gauges are those of one of them. */
function showServed(models, shown) {
  $("served").hidden = !models.length;
  if (!models.length) return;
  const rows = models.map((one) => [one.name === shown ? `${one.name} (below)` : one.name, servedText(one)]);
  showRows($("served-rows"), rows, "loaded", `${models.filter((one) => one.state === "loaded").length} of ${models.length} are loaded.`);
}

function servedText(one) {
  if (one.state === "loading") return `loading, ready in ${duration(one.ready_in)}`;
  if (one.waiting) return `waits for room, ready in ${duration(one.ready_in)}`;
  if (one.state !== "loaded") return one.fault || `${one.state}; ${size(one.bytes)}, loads in ${duration(one.load_seconds)}`;
  const until = one.expires_in === null || one.running ? "" : `, goes in ${duration(one.expires_in)}`;
  return `${size(one.device_memory)}, ${one.running ? `${number(one.running)} running` : "idle"}${until}`;
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

/** Where nothing drafts there is nothing to be seen. */
function showSpeculation(found) {
  $("speculation").hidden = !found;
  if (!found) return;
  const rows = [["tokens drafted", number(found.drafted)], ["of these accepted", number(found.accepted)]];
  const beside = { self: " and by the model in four bits", mtp: " and by the model's MTP layer", model: " and by a draft model" }[found.drafter] ?? "";
  const last = found.tokens ? `A pass gave ${number(found.tokens_a_pass)} tokens to each output.` : "There is no output yet.";
  showRows($("drafts"), rows, "tokens a pass", `${last} Drafts come by look-up${beside}.`);
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

let looking = false;
const watching = [];

/** Call `then` with each state; with null where the server tells none. */
export const watchState = (then) => watching.push(then);

export async function look() {
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
    for (const then of watching) then(null);
    return;
  } finally {
    looking = false;
  }
  showState(state);
  for (const then of watching) then(state);
  await lookAtExperts();
}
