// The page's frame: views by the address, the keys, and the connection to the server.

import { h, setClass, setText } from "./dom.js";
import { changed, listen, store, takeChange, takeState } from "./store.js";
import { plural } from "./format.js";
import { overview } from "./overview.js";
import { cacheView } from "./cache.js";
import { steps } from "./steps.js";
import { requests } from "./requests.js";
import { adapters } from "./adapters.js";
import { compare } from "./compare.js";
import { whatIf } from "./whatif.js";

const VIEWS = { overview, cache: cacheView, steps, requests, adapters, compare, whatif: whatIf };
const TITLES = { overview: "Overview", cache: "Cache", steps: "Steps", requests: "Requests", adapters: "Adapters", compare: "Compare", whatif: "What if" };

const byId = (id) => document.getElementById(id);

// Keys: in this tab's memory, never in a cookie.
const keys = { admin: sessionStorage.getItem("admin-key") || "", api: sessionStorage.getItem("api-key") || "" };

// What a request to our own server takes along.
export function headers(kind = "admin") {
  const key = kind === "api" ? keys.api || keys.admin : keys.admin || keys.api;
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function ask(path, body = undefined) {
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: body === undefined ? headers() : { ...headers(), "content-type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  const read = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(read.error?.message || `the server answered ${answer.status}`);
  return read;
}

// The stream is read in a worker.
const policy = globalThis.trustedTypes?.createPolicy("page", { createScriptURL: (url) => url });
const workerUrl = new URL("./worker.js", import.meta.url).href;
const worker = new Worker(policy ? policy.createScriptURL(workerUrl) : workerUrl, { type: "module" });
worker.onmessage = ({ data }) => {
  if (data.type === "state") takeState(data.data);
  else if (data.type === "change") takeChange(data.data);
  else if (data.type === "tree") {
    store.tree = data.tree;
    changed();
  } else take(data);
};

function take({ type, code, message }) {
  store.status = type;
  store.refusal = message || "";
  if (type === "refused" && code === 401) askForKeys(message);
  changed();
}

let wantsTree = false;
export function connect(tree = wantsTree) {
  wantsTree = tree;
  const url = new URL(`page/stream${tree ? "?tree=1" : ""}`, document.baseURI).href;
  worker.postMessage({ type: "open", url, key: keys.admin || keys.api });
}

export function askWorker(message, transfer = []) {
  worker.postMessage(message, transfer);
}

// For measurements: a tree that no server has.
globalThis.showTree = (tree) => worker.postMessage({ type: "fake_tree", tree });

const dialog = byId("key-dialog");
function askForKeys(message = "") {
  if (dialog.open) return;
  byId("admin-key").value = keys.admin;
  byId("api-key").value = keys.api;
  setText(byId("key-error"), message);
  dialog.showModal();
}
byId("keys").addEventListener("click", () => askForKeys());
byId("key-form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "save") return;
  keys.admin = byId("admin-key").value.trim();
  keys.api = byId("api-key").value.trim();
  sessionStorage.setItem("admin-key", keys.admin);
  sessionStorage.setItem("api-key", keys.api);
  connect();
});

// Views
let shown = null;
function show() {
  const name = location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview";
  if (shown?.name === name) return;
  shown?.view.leave?.();
  const view = VIEWS[name]();
  shown = { name, view };
  const place = byId("view");
  place.replaceChildren(h("div", { class: "head" }, h("h1", {}, TITLES[name]), view.lead ? h("p", { class: "muted" }, view.lead) : null), ...view.nodes);
  document.title = `${TITLES[name]} · manyroots`;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (Boolean(view.wantsTree) !== wantsTree) connect(Boolean(view.wantsTree));
  changed();
}
addEventListener("hashchange", show);
addEventListener("resize", changed);

const PHASES = { ready: "good", draining: "warn", restarting: "bad", loading: "warn", asleep: "warn", dead: "bad" };
listen(() => {
  const { facts, now, status } = store;
  const isLive = status === "open" && now.phase;
  setText(byId("phase"), isLive ? (now.is_paused ? "paused" : now.phase) : status === "open" ? "connecting" : status);
  setClass(byId("phase"), `pill ${isLive ? (now.is_paused ? "warn" : PHASES[now.phase] || "") : "warn"}`);
  if (facts.model && byId("served").dataset.model !== facts.model) {
    byId("served").dataset.model = facts.model;
    byId("served").replaceChildren(h("strong", {}, facts.model), ` · ${facts.dtype} on ${facts.device} · ${facts.policy} · manyroots ${facts.version}`);
  }
  notice(status, now, facts);
  shown?.view.draw?.();
});

function notice(status, now, facts) {
  let text = "";
  let isBad = false;
  if (status === "refused") {
    text = store.refusal;
    isBad = true;
  } else if (status === "lost") {
    text = "The connection to the server is lost; trying again.";
    isBad = true;
  } else if (now.phase === "restarting") {
    const stage = now.progress ? ` ${now.progress[0]}: ${now.progress[1]} of ${now.progress[2]}.` : "";
    text = `The engine has died and is being started again; ${plural(now.waiting || 0, "request")} wait.${stage}`;
    isBad = true;
  } else if (now.phase === "loading") {
    text = `The model is loading.${now.progress ? ` ${now.progress[0]}: ${now.progress[1]} of ${now.progress[2]}.` : ""}`;
  } else if (now.phase === "asleep") text = "The engine is asleep; POST /wake_up wakes it.";
  else if (now.phase === "dead") text = "The engine has died; the server is ending.";
  else if (facts.is_read_only) text = "Read-only, and for this machine alone: the server has no --admin-key.";
  const node = byId("notice");
  node.hidden = !text;
  setText(node, text);
  setClass(node, isBad ? "notice bad" : "notice");
}

show();
connect();
