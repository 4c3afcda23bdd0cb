// The last minutes of traffic, replayed by the simulator under other settings.

import { Table, h, panel, setText } from "./dom.js";
import { ask, headers } from "./app.js";
import { changed, store } from "./store.js";
import { count, plural } from "./format.js";

const FIGURES = [
  ["Output tokens / s", (f) => f.output_tokens_per_s.toFixed(1)],
  ["Hit rate", (f) => `${(100 * f.hit_rate).toFixed(1)}%`],
  ["First token, p50", (f) => time(f.first_token_s[0])],
  ["First token, p99", (f) => time(f.first_token_s[1])],
  ["Between tokens, p50", (f) => time(f.between_s[0])],
  ["Between tokens, p99", (f) => time(f.between_s[1])],
  ["Retractions", (f) => (f.retractions === null ? "–" : count(f.retractions))],
  ["Most pages held", (f) => (f.peak_pages === null ? "–" : count(f.peak_pages))],
  ["Adapter loads", (f) => (f.adapter_loads === null ? "–" : count(f.adapter_loads))],
  ["Duration", (f) => `${f.duration_s.toFixed(1)} s`],
];
const time = (value) => (value === null ? "–" : value >= 10 ? `${value.toFixed(1)} s` : `${(1000 * value).toFixed(value < 0.1 ? 2 : 0)} ms`);

export function whatIf() {
  let isRunning = false;
  let result = null;
  const box = (isOn) => { const node = h("input", { type: "checkbox" }); node.checked = isOn; return node; };
  const twice = box(true);
  const half = box(false);
  const loras = box(true);
  const traffic = box(false);
  const policy = h("select", { "aria-label": "Another policy" }, ["fcfs", "fair", "pack", "priority"].map((name) => h("option", { value: name }, name)));
  const withPolicy = box(true);
  policy.value = "fair";
  const run = h("button", { type: "submit", class: "primary" }, "Replay");
  const said = h("span", { class: "muted", role: "status" });
  const error = h("p", { class: "error", role: "alert" });
  const link = h("a", { href: "page/trace", download: "trace.jsonl", onclick: download }, "Download the trace");
  const form = h(
    "form",
    { class: "row", onsubmit: (event) => { event.preventDefault(); replay(); } },
    h("label", { class: "check" }, twice, "twice the memory"),
    h("label", { class: "check" }, half, "half the memory"),
    h("label", { class: "check" }, withPolicy, "policy", policy),
    h("label", { class: "check" }, loras, "twice the adapters at once"),
    h("label", { class: "check" }, traffic, "twice the traffic"),
    run,
    said,
  );
  const place = h("div");

  // A link can't carry the key: the file is fetched, and handed to the browser.
  async function download(event) {
    event.preventDefault();
    setText(error, "");
    const answer = await fetch("page/trace", { headers: headers(), cache: "no-store" });
    if (!answer.ok) {
      setText(error, (await answer.json().catch(() => ({}))).error?.message || `the server answered ${answer.status}`);
      return;
    }
    const url = URL.createObjectURL(await answer.blob());
    const anchor = h("a", { href: url, download: "trace.jsonl" });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  async function replay() {
    const variants = [];
    if (twice.checked) variants.push({ name: "Twice the memory", memory: 2 });
    if (half.checked) variants.push({ name: "Half the memory", memory: 0.5 });
    if (withPolicy.checked) variants.push({ name: `Policy ${policy.value}`, policy: policy.value });
    if (loras.checked && store.settings.max_loras) variants.push({ name: "Twice the adapters at once", adapters: 2 });
    if (traffic.checked) variants.push({ name: "Twice the traffic", traffic: 2 });
    isRunning = true;
    setText(error, "");
    changed();
    try {
      result = await ask("page/simulate", { variants });
      show();
    } catch (failure) {
      setText(error, failure.message);
    }
    isRunning = false;
    changed();
  }

  function show() {
    const columns = [
      { title: "Figure", fill: (node, row) => setText(node, row[0]) },
      ...result.columns.map((column) => ({ title: column.name, num: true, fill: (node, row) => setText(node, row[1](column.figures)) })),
    ];
    const table = new Table(columns, { caption: "Figures side by side" });
    table.show(FIGURES);
    place.replaceChildren(
      panel(
        "Side by side",
        table.node,
        h("p", { class: "muted" }, `${plural(result.num_requests, "request")} of the last ${Math.round(result.seconds)} s. Steps are modelled by the times of the last ${count(result.num_steps)}: ${result.costs.filter(([, value]) => Number(value) > 0).map(([name, value]) => `${name} ${value}`).join(", ")}.`),
      ),
    );
  }

  function draw() {
    run.disabled = isRunning;
    setText(said, isRunning ? "replaying, in a process of its own" : "");
  }

  return {
    draw,
    lead: "the last minutes of traffic under other settings",
    nodes: [
      panel("Replay", form, error, h("p", { class: "muted" }, "The traffic is kept without texts: as keyed digests of pages. ", link, "; manyroots simulate FILE reads it.")),
      place,
    ],
  };
}
