// The use of each expert of a mixture, as a map and as a table.

import { Bars, showRows } from "./bars.js";
import { $, make, write } from "./dom.js";
import { number, size } from "./numbers.js";
import { ask } from "./server.js";

const sources = new Bars();
$("sources").append(sources.node);
/** What /experts said last. */
let map = null;

/** found: null where all experts rest on the device. rate: tokens a second that are computed. */
export function showExperts(found, rate) {
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
export async function lookAtExperts() {
  if ($("experts").hidden || !$("map").open) return;
  try {
    showMap(await (await ask("/experts", { signal: AbortSignal.timeout(10000) })).json());
  } catch { /* `look` says what is wrong. */ }
}
