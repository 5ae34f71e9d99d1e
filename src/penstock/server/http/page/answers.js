// Answers: asked for, shown as they come, and with what is known of how long that takes.

import { add, messagesOf, now, path } from "./chats.js";
import { $, tell, write } from "./dom.js";
import { counted, duration, number } from "./numbers.js";
import { Refused, eventsOf, post } from "./server.js";
import { lookAtModels, model, settings } from "./settings.js";
import { acts, keepOrTell, redraw, showEnded, showThread } from "./thread.js";

/** Milliseconds after which what has come of an answer is kept. */
const KEPT = 3000;
/** Called when the list of conversations has to be shown anew, and when an answer has ended; `list.js` gives them. */
export const changed = { chats: null, ended: null };

acts.answer = answer;
acts.retry = retry;

/** Whether something can be asked now; if not, that is said. */
export function ready() {
  if (now.live || settings() === null) return false;
  if (model()) return true;
  tell("The model is not there yet.");
  lookAtModels();
  return false;
}

/** Answer the turn at the end of what is shown. */
export async function answer() {
  if (!ready()) {
    showThread(true);
    return;
  }
  const { system, ...sampling } = settings(), { chat } = now, messages = messagesOf(path(chat), system);
  const turn = add(chat, { role: "assistant", content: "", reasoning: "", model: model(), open: true });
  const own = now.live = { chat, turn, ended: new AbortController(), begin: performance.now(), thinking: 0, first: 0, state: null, due: null };
  if (!now.chats.includes(chat)) now.chats = [chat, ...now.chats];
  tell("");
  keepOrTell(chat);
  changed.chats();
  showThread();
  showProgress();
  $("say").focus();
  const keeping = setInterval(() => keepOrTell(chat), KEPT), ticking = setInterval(showProgress, 500);
  let end = { usage: null, reason: null };
  try {
    end = await read(own, { model: turn.model, messages, stream: true, stream_options: { include_usage: true }, ...sampling });
    if (end.reason === null) turn.fault = "The connection has ended before the answer did.";
  } catch (fault) {
    if (fault.name === "AbortError") turn.note = "Stopped.";
    else if (own.left) return;  // The page is being closed; what has come is kept.
    else turn.fault = fault instanceof Refused ? `Not answered: ${fault.message}.` : "The server cannot be reached.";
  }
  clearInterval(keeping);
  clearInterval(ticking);
  if (own.thinking && !own.first) turn.thought = (performance.now() - own.thinking) / 1000;
  if (end.reason !== null && end.usage) turn.note = noteOf(own, end);
  delete turn.open;
  const focused = document.activeElement === $("stop");
  now.live = null;
  keepOrTell(chat);
  showEnded();
  if (focused) $("say").focus();
  changed.ended();
}

/** Add to a turn what comes; return its usage and the reason why it ended, null where none came. */
async function read(own, body) {
  const { turn } = own, end = { usage: null, reason: null };
  const answer = await post("/v1/chat/completions", body, own.ended.signal), expected = answer.headers.get("X-Expected-First-Token");
  if (expected !== null && expected !== "unknown") own.due = performance.now() + 1000 * Number(expected);
  for await (const event of eventsOf(answer)) {
    if (event.error) throw new Refused(200, event.error.message);
    end.usage = event.usage ?? end.usage;
    const choice = event.choices[0];
    if (!choice) continue;
    end.reason = choice.finish_reason ?? end.reason;
    const said = choice.delta.content ?? "", thought = choice.delta.reasoning_content ?? "";
    const begins = (thought && !own.thinking) || (said && !own.first);
    if (thought) own.thinking ||= performance.now();
    if (said && !own.first) {
      own.first = performance.now();
      if (own.thinking) turn.thought = (own.first - own.thinking) / 1000;
    }
    turn.content += said;
    turn.reasoning += thought;
    if (begins) showProgress();
    redraw();
  }
  return end;
}

function noteOf(own, { usage, reason }) {
  const first = own.thinking || own.first || performance.now();
  const count = usage.completion_tokens, seconds = (performance.now() - first) / 1000;
  const each = count > 1 && seconds > 0.05 ? `, ${number((count - 1) / seconds)} a second` : "";
  const found = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${counted(count, "token")}${each}; the first after ${number((first - own.begin) / 1000)} s` + (found ? `, ${number(found)} of ${number(usage.prompt_tokens)} of the prompt found` : "") + (reason === "length" ? "; cut at the limit" : "") + ".";
}

/** Answer once more in place of an answer, which stays beside the new one. */
function retry(turn) {
  if (!ready()) return;
  now.chat.at = turn.parent;
  answer();
}

export function stop() {
  now.live?.ended.abort();
}

// ---- how far it is

export function note(state) {
  if (!now.live) return;
  now.live.state = state;
  showProgress();
}

/** Say what the server does for the answer under way, as far as it tells. */
function showProgress() {
  if (!now.live) return;
  const { begin, thinking, first, state, turn, due } = now.live, since = (from) => duration((performance.now() - from) / 1000);
  const alone = state ? state.running + state.waiting <= 1 : true;
  const prompt = !first && !thinking ? state?.prompt : null, bar = $("reading");
  bar.hidden = !prompt;
  if (prompt) {
    bar.max = prompt.length;
    bar.value = prompt.reached;
  }
  const coming = state?.models.find((one) => one.name === turn.model && one.state !== "loaded");
  write($("doing"), doing({ first, thinking, prompt, alone, state, since, begin, due, coming }));
}

function doing({ first, thinking, prompt, alone, state, since, begin, due, coming }) {
  const rate = state?.output_rate ? ` · ${number(state.output_rate)} tokens/s${alone ? "" : ` in all, of ${state.running} running`}` : "";
  if (first) return `Writing for ${since(first)}${rate}`;
  if (thinking) return `Thinking for ${since(thinking)}${rate}`;
  if (prompt) {
    const left = prompt.left === null ? "" : ` · ${duration(prompt.left)} left`;
    return `Reading ${alone ? "the" : "a"} prompt: ${number(prompt.reached)} of ${number(prompt.length)} tokens${left}`;
  }
  if (coming) return `Loading ${coming.name}, ready in ${duration(coming.ready_in)}`;
  const others = state && state.waiting ? ` · ${counted(state.running, "request")} running, ${number(state.waiting)} waiting` : "";
  const rest = due === null ? 0 : due - performance.now(), left = rest > 0 ? ` · first token expected in ${duration(rest / 1000)}` : "";
  return `Waiting for ${since(begin)}${others}${left}`;
}
