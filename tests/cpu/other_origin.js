// What a page can try against a server of another origin. Each way is given an address there, and tells what the page could read: of what
// was only let in, that it was; nothing, if it could read nothing.
"use strict";

const PATIENCE = 5000;
const ALLOWED = "it may be used";
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const inTime = (promise) => Promise.race([promise, pause(PATIENCE).then(() => "")]);
const told = async (url, how) => (await fetch(url, how)).text();
const JSON_KIND = { "Content-Type": "application/json" };
const keyed = () => ({ Authorization: `Bearer ${window.key}` });
const inJson = (body) => new Blob([body], { type: "application/json" });
const posted = (url, body, how) => told(url, { method: "POST", body, ...how });

function within(frame) {
  try {
    return frame.contentDocument.documentElement.textContent;
  } catch {
    return "";
  }
}

/** What can be read of an element when it has come, if it comes. */
function loaded(element, attributes, read) {
  return new Promise((done) => {
    element.onload = () => done(read(element));
    element.onerror = () => done("");
    Object.assign(element, attributes);
    document.body.append(element);
  });
}

async function opened(page) {
  try {
    while (page.location.href === "about:blank" || page.document.readyState !== "complete") await pause(10);
    return page.document.documentElement.textContent;
  } catch {
    return ""; // It is another origin's by now.
  } finally {
    page.close();
  }
}

let names = 0;

function formed(url, enctype, fields, target = "") {
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: url, enctype, target });
  for (const [name, value] of Object.entries(fields)) {
    form.append(Object.assign(document.createElement("input"), { type: "hidden", name, value }));
  }
  document.body.append(form);
  return form;
}

/** A form's answer, in a frame that nobody sees. */
function sent(url, enctype, fields) {
  const frame = Object.assign(document.createElement("iframe"), { name: `frame${(names += 1)}`, hidden: true });
  document.body.append(frame);
  return new Promise((done) => {
    frame.onload = () => done(within(frame));
    formed(url, enctype, fields, frame.name).submit();
  });
}

function sentInWindow(url, enctype, fields) {
  const page = window.open("about:blank", `window${(names += 1)}`);
  formed(url, enctype, fields, page.name).submit();
  return opened(page);
}

/** JSON whose end is a text, in a form's one field: what it is called, `=`, and what it holds. */
const plainly = (body) => ({ [body.slice(0, -2)]: body.slice(-2) });

const separately = (body) => Object.fromEntries(Object.entries(JSON.parse(body)).map(([name, value]) => [name, JSON.stringify(value)]));
const sentOn = (url) => `/sent-on?to=${encodeURIComponent(url)}`;

function byRequest(method, url, body, kind) {
  return new Promise((done) => {
    const request = new XMLHttpRequest();
    request.onloadend = () => done(request.responseText);
    request.open(method, url);
    if (kind) request.setRequestHeader("Content-Type", kind);
    request.send(body);
  });
}

function heard(source) {
  return new Promise((done) => {
    source.onmessage = (event) => done(event.data);
    source.onerror = () => done("");
  }).finally(() => source.close());
}

window.ways = {
  // Asking.
  "fetch": (url) => told(url),
  "fetch with credentials": (url) => told(url, { credentials: "include" }),
  "fetch without CORS": (url) => told(url, { mode: "no-cors" }),
  "fetch sent on": (url) => told(sentOn(url)),
  "XMLHttpRequest": (url) => byRequest("GET", url),
  "EventSource": (url) => heard(new EventSource(url)),
  "WebSocket": (url) => heard(new WebSocket(url.replace("http", "ws"))),
  "script": (url) => loaded(document.createElement("script"), { src: url }, () => window.heron || ALLOWED),
  "module": (url) => import(url).then((module) => module.heron || ALLOWED),
  "stylesheet": (url) =>
    loaded(document.createElement("link"), { rel: "stylesheet", href: url }, () =>
      getComputedStyle(document.body).getPropertyValue("--heron") || ALLOWED,
    ),
  "prefetch": (url) => loaded(document.createElement("link"), { rel: "prefetch", href: url }, () => ALLOWED),
  "preload": (url) => loaded(document.createElement("link"), { rel: "preload", as: "fetch", href: url }, () => ALLOWED),
  "img": (url) => loaded(new Image(), { src: url }, (image) => `${image.naturalWidth} wide`),
  "object": (url) => loaded(document.createElement("object"), { data: url }, (object) => within(object) || ALLOWED),
  "iframe": (url) => loaded(document.createElement("iframe"), { src: url }, within),
  "window": (url) => opened(window.open(url)),

  // Making it work.
  "form, text/plain": (url, body) => sent(url, "text/plain", plainly(body)),
  "form, urlencoded": (url, body) => sent(url, "application/x-www-form-urlencoded", separately(body)),
  "form, multipart": (url, body) => sent(url, "multipart/form-data", separately(body)),
  "form in a window": (url, body) => sentInWindow(url, "text/plain", plainly(body)),
  "form sent on": (url, body) => sent(sentOn(url), "text/plain", plainly(body)),
  "form in a sandbox": (url, body) => {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-scripts allow-forms";
    const form = formed(url, "text/plain", plainly(body)).outerHTML;
    return loaded(frame, { srcdoc: `${form}<script>document.forms[0].submit()</script>` }, within);
  },
  "fetch of text": (url, body) => posted(url, body),
  "fetch of text without CORS": (url, body) => posted(url, body, { mode: "no-cors" }),
  "fetch of text without a referrer": (url, body) => posted(url, body, { mode: "no-cors", referrerPolicy: "no-referrer" }),
  "fetch of text sent on": (url, body) => posted(sentOn(url), body, { mode: "no-cors" }).catch(() => ""),
  "fetch of a blob without CORS": (url, body) => posted(url, body, { mode: "no-cors", body: inJson(body) }),
  "fetch of JSON without CORS": (url, body) => posted(url, body, { mode: "no-cors", headers: JSON_KIND }),
  "fetch that stays alive": (url, body) => posted(url, body, { mode: "no-cors", keepalive: true }),
  "XMLHttpRequest of text": (url, body) => byRequest("POST", url, body, "text/plain"),
  "beacon": (url, body) => void navigator.sendBeacon(url, body),
  "ping": (url) => {
    const link = document.createElement("a");
    Object.assign(link, { href: "#pinged", ping: url });
    link.click();
  },
  "report": (url) => {
    const frame = document.createElement("iframe");
    frame.src = `/attack?report=${encodeURIComponent(url)}`;
    document.body.append(frame);
  },

  // Making it work by what needs a permission.
  "fetch of JSON": (url, body) => posted(url, body, { headers: JSON_KIND }),
  "fetch of a JSON blob": (url, body) => posted(url, body, { body: inJson(body) }),
  "fetch with a key": (url, body) => posted(url, body, { headers: { ...JSON_KIND, ...keyed() } }),
  "fetch of text with a key": (url, body) => posted(url, body, { headers: keyed() }),
  "XMLHttpRequest of JSON": (url, body) => byRequest("POST", url, body, "application/json"),
  "beacon of JSON": (url, body) => void navigator.sendBeacon(url, inJson(body)),
  "deletion": (url, body) => posted(url, body, { method: "DELETE" }),
};

/** What could be read at each address; bodies: what is sent there, as JSON. */
window.attempt = async (way, bodies, key) => {
  window.key = key;
  window.results = {};
  await Promise.all(
    Object.entries(bodies).map(async ([url, body]) => {
      const read = (async () => window.ways[way](url, body))().catch(() => "");
      window.results[url] = (await inTime(read)) ?? "";
    }),
  );
  return window.results;
};
