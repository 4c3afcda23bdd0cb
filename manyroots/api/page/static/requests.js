// Every request, what it waits for, what it reused and why not more; abort it from here.

import { Table, h, panel, setClass, setText, swatch } from "./dom.js";
import { ask } from "./app.js";
import { REQUEST, adapterColour, changed, store } from "./store.js";
import { count, percent, plural, seconds } from "./format.js";

const PER_PAGE = 50;
const LIMITS = {
  nothing: "all but the last token was found",
  cold: "the rest was never computed here, or was evicted",
  namespace: "the rest is known for another adapter or the base model only",
  window: "a window's pages before the next boundary are gone",
  checkpoint: "no state was saved further on",
  tier: "loading more would take longer than computing it",
  storage: "storage may have more and was too slow to ask",
  off: "prefix caching is off",
};
const STATES = { running: "good", waiting: "warn", loading: "info", fetching: "info", preparing: "info", paused: "warn", draining: "" };
const NAMES = {};

export function requests() {
  let page = 0;
  const filter = h("input", { type: "search", placeholder: "adapter, state, reason or number", "aria-label": "Filter requests", oninput: () => { page = 0; changed(); } });
  const said = h("span", { class: "muted", role: "status" });
  const error = h("p", { class: "error", role: "alert" });
  const earlier = h("button", { type: "button", class: "small", onclick: () => { page -= 1; changed(); } }, "Earlier");
  const later = h("button", { type: "button", class: "small", onclick: () => { page += 1; changed(); } }, "Later");
  const table = new Table(
    [
      { title: "Request", num: false, fill: (node, row) => setText(node, `#${row[REQUEST.id]}`) },
      {
        title: "Adapter",
        class: "name",
        make: (inner) => {
          const mark = swatch("transparent");
          const name = h("span");
          const tenant = h("div", { class: "why" });
          inner.append(h("span", { class: "tag" }, mark, name), tenant);
          return { mark, name, tenant };
        },
        fill: ({ mark, name, tenant }, row) => {
          setText(name, row[REQUEST.adapter] ?? "base model");
          setText(tenant, row[REQUEST.tenant] ? `tenant ${row[REQUEST.tenant]}` : "");
          mark.style.background = `var(${adapterColour(row[REQUEST.adapter])})`;
        },
      },
      {
        title: "State, and why it waits",
        make: (inner) => {
          const state = h("span", { class: "pill" });
          const wait = h("strong");
          const why = h("div", { class: "why" });
          inner.append(h("span", { class: "row" }, state, wait), why);
          return { state, wait, why };
        },
        fill: ({ state, wait, why }, row) => {
          setText(state, NAMES[row[REQUEST.state]] || row[REQUEST.state]);
          setClass(state, `pill ${STATES[row[REQUEST.state]] ?? ""}`);
          setText(wait, row[REQUEST.wait]);
          setText(why, row[REQUEST.reason]);
        },
      },
      {
        title: "Prompt",
        num: true,
        make: (inner) => {
          const text = h("span");
          const bar = h("span");
          inner.append(text, h("span", { class: "meter", "aria-hidden": "true" }, bar));
          return { text, bar };
        },
        fill: ({ text, bar }, row) => {
          const done = Math.min(row[REQUEST.computed], row[REQUEST.prompt]);
          setText(text, `${count(done)} / ${count(row[REQUEST.prompt])}`);
          bar.style.width = `${(100 * done) / Math.max(1, row[REQUEST.prompt])}%`;
        },
      },
      { title: "Output", num: true, fill: (node, row) => setText(node, row[REQUEST.maxOutput] > 1e6 ? count(row[REQUEST.output]) : `${count(row[REQUEST.output])} / ${count(row[REQUEST.maxOutput])}`) },
      {
        title: "Reused, and why not more",
        make: (inner) => {
          const much = h("div");
          const why = h("div", { class: "why" });
          inner.append(much, why);
          return { much, why };
        },
        fill: ({ much, why }, row) => {
          const has = row[REQUEST.limit] !== "";
          const device = row[REQUEST.cached] - row[REQUEST.host] - row[REQUEST.storage];
          const tiers = [[device, "device"], [row[REQUEST.host], "host"], [row[REQUEST.storage], "storage"]].filter(([n]) => n > 0);
          setText(much, !has ? "not yet looked up" : tiers.length ? `${tiers.map(([n, tier]) => `${count(n)} from ${tier}`).join(", ")} (${percent(row[REQUEST.cached], row[REQUEST.prompt])})` : "nothing");
          setText(why, has ? LIMITS[row[REQUEST.limit]] || row[REQUEST.limit] : "");
        },
      },
      { title: "Pages", num: true, fill: (node, row) => setText(node, count(row[REQUEST.pages])) },
      { title: "Age", num: true, fill: (node, row) => setText(node, row[REQUEST.came] === null ? "–" : seconds(store.now.at - row[REQUEST.came])) },
      {
        title: "Action",
        make: (inner, item) => {
          const button = h("button", { type: "button", class: "small danger", onclick: () => abort(item()[REQUEST.id]) }, "Abort");
          inner.append(button);
          return button;
        },
        fill: (button, row) => {
          button.disabled = store.facts.is_read_only !== false;
          const label = `Abort request ${row[REQUEST.id]}`;
          if (button.getAttribute("aria-label") !== label) button.setAttribute("aria-label", label);
        },
      },
    ],
    { caption: "Requests" },
  );
  const empty = h("p", { class: "empty" }, "No request is running or waiting.");

  async function abort(id) {
    setText(error, "");
    try {
      await ask("page/abort", { request_id: id });
    } catch (failure) {
      setText(error, failure.message);
    }
  }

  function draw() {
    const wanted = filter.value.trim().toLowerCase();
    const rows = [...store.requests.values()].filter((row) => !wanted || matches(row, wanted));
    rows.sort((a, b) => (a[REQUEST.wait] ? 1 : 0) - (b[REQUEST.wait] ? 1 : 0) || a[REQUEST.id] - b[REQUEST.id]);
    const last = Math.max(0, Math.ceil(rows.length / PER_PAGE) - 1);
    page = Math.min(Math.max(page, 0), last);
    const part = rows.slice(page * PER_PAGE, (page + 1) * PER_PAGE);
    table.show(part);
    table.node.hidden = part.length === 0;
    empty.hidden = part.length > 0;
    const all = store.now.requests || 0;
    setText(said, rows.length ? `${count(page * PER_PAGE + 1)} to ${count(page * PER_PAGE + part.length)} of ${plural(rows.length, "request")}${all > store.requests.size ? ` (${count(all)} in all)` : ""}` : "");
    earlier.disabled = page === 0;
    later.disabled = page === last;
  }

  return { draw, lead: "what each one waits for, and what it reused", nodes: [panel(null, h("div", { class: "row controls" }, filter, earlier, later, said), error, table.node, empty)] };
}

function matches(row, wanted) {
  const parts = [`#${row[REQUEST.id]}`, row[REQUEST.adapter] ?? "base model", row[REQUEST.state], NAMES[row[REQUEST.state]] || "", row[REQUEST.wait], row[REQUEST.reason], row[REQUEST.tenant] ? `tenant ${row[REQUEST.tenant]}` : ""];
  return parts.some((part) => part.toLowerCase().includes(wanted));
}
