// Adapters by tier, with what they cost and how often they were paused; load, unload and pin them.

import { Table, h, panel, setClass, setText, swatch } from "./dom.js";
import { ask } from "./app.js";
import { ADAPTER, adapterColour, changed, store } from "./store.js";
import { bytes, count, percent, plural } from "./format.js";

const TIERS = { device: 0, host: 1, storage: 2 };
const STATES = { running: "good", loading: "info", paused: "warn", waiting: "warn" };

export function adapters() {
  const error = h("p", { class: "error", role: "alert" });
  const said = h("span", { class: "muted", role: "status" });
  const filter = h("input", { type: "search", placeholder: "name, tier or state", "aria-label": "Filter adapters", oninput: changed });
  let isBusy = false;

  async function act(work) {
    setText(error, "");
    isBusy = true;
    changed();
    try {
      await work();
    } catch (failure) {
      setText(error, failure.message);
    }
    isBusy = false;
    changed();
  }

  const name = h("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const path = h("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const pinned = h("input", { type: "checkbox" });
  const load = h("button", { type: "submit", class: "primary" }, "Load");
  const form = h(
    "form",
    {
      class: "row",
      onsubmit: (event) => {
        event.preventDefault();
        act(async () => {
          await ask("v1/load_lora_adapter", { lora_name: name.value, lora_path: path.value, pinned: pinned.checked });
          form.reset();
        });
      },
    },
    h("label", { class: "field" }, "Name", name),
    h("label", { class: "field" }, "Folder on the server", path),
    h("label", { class: "check" }, pinned, "Pinned"),
    load,
  );
  const off = h("p", { class: "muted" }, "To load, unload and pin adapters from here, start the server with --enable-lora-endpoints, --lora-dirs and --admin-key.");

  const table = new Table(
    [
      {
        title: "Adapter",
        class: "name",
        make: (inner) => {
          const mark = swatch("transparent");
          const text = h("span");
          const more = h("div", { class: "why mono" });
          inner.append(h("span", { class: "tag" }, mark, text), more);
          return { mark, text, more };
        },
        fill: ({ mark, text, more }, row) => {
          setText(text, row[ADAPTER.name]);
          setText(more, row[ADAPTER.digest]);
          mark.style.background = `var(${adapterColour(row[ADAPTER.name])})`;
        },
      },
      { title: "Tier", fill: (node, row) => setText(node, row[ADAPTER.tier]) },
      {
        title: "State",
        make: (inner) => {
          const state = h("span", { class: "pill" });
          const more = h("span", { class: "muted" });
          inner.append(h("span", { class: "row" }, state, more));
          return { state, more };
        },
        fill: ({ state, more }, row) => {
          setText(state, row[ADAPTER.state]);
          setClass(state, `pill ${STATES[row[ADAPTER.state]] || ""}`);
          setText(more, [row[ADAPTER.pinned] ? "pinned" : "", row[ADAPTER.draining] ? "draining" : ""].filter(Boolean).join(", "));
        },
      },
      { title: "Rank", num: true, fill: (node, row) => setText(node, row[ADAPTER.rank] || "–") },
      { title: "Size", num: true, fill: (node, row) => setText(node, row[ADAPTER.bytes] ? bytes(row[ADAPTER.bytes]) : "–") },
      { title: "Running", num: true, fill: (node, row) => setText(node, count(row[ADAPTER.running])) },
      { title: "Waiting", num: true, fill: (node, row) => setText(node, count(row[ADAPTER.waiting])) },
      { title: "Answered", num: true, fill: (node, row) => setText(node, count(row[ADAPTER.requests])) },
      { title: "Hit rate", num: true, fill: (node, row) => setText(node, percent(row[ADAPTER.cached], row[ADAPTER.prompt])) },
      { title: "Loads", num: true, fill: (node, row) => setText(node, count(row[ADAPTER.loads])) },
      { title: "Pauses", num: true, fill: (node, row) => setText(node, count(row[ADAPTER.pauses])) },
      {
        title: "Actions",
        make: (inner, item) => {
          const pin = h("button", { type: "button", class: "small", onclick: () => act(() => ask("v1/load_lora_adapter", { lora_name: item()[ADAPTER.name], lora_path: item()[ADAPTER.path], load_inplace: true, pinned: !item()[ADAPTER.pinned] })) });
          const unload = h("button", { type: "button", class: "small danger", onclick: () => act(() => ask("v1/unload_lora_adapter", { lora_name: item()[ADAPTER.name] })) }, "Unload");
          inner.append(h("span", { class: "row" }, pin, unload));
          return { pin, unload };
        },
        fill: ({ pin, unload }, row) => {
          const can = store.facts.can_load && !isBusy && !row[ADAPTER.draining];
          pin.disabled = unload.disabled = !can;
          setText(pin, row[ADAPTER.pinned] ? "Unpin" : "Pin");
          label(pin, `${row[ADAPTER.pinned] ? "Unpin" : "Pin"} ${row[ADAPTER.name]}`);
          label(unload, `Unload ${row[ADAPTER.name]}`);
        },
      },
    ],
    { caption: "Adapters" },
  );
  const empty = h("p", { class: "empty" }, "No adapter is known; the base model answers alone.");

  function draw() {
    const wanted = filter.value.trim().toLowerCase();
    const rows = [...store.adapters.values()].filter((row) => !wanted || [row[ADAPTER.name], row[ADAPTER.tier], row[ADAPTER.state]].some((part) => part.toLowerCase().includes(wanted)));
    rows.sort((a, b) => TIERS[a[ADAPTER.tier]] - TIERS[b[ADAPTER.tier]] || (a[ADAPTER.name] < b[ADAPTER.name] ? -1 : 1));
    table.show(rows.slice(0, 300));
    table.node.hidden = rows.length === 0;
    empty.hidden = rows.length > 0;
    const tiers = Object.keys(TIERS).map((tier) => `${count(rows.filter((row) => row[ADAPTER.tier] === tier).length)} on ${tier === "storage" ? "storage alone" : `the ${tier}`}`);
    setText(said, rows.length ? `${plural(rows.length, "adapter")}: ${tiers.join(", ")}; at most ${count(store.facts.max_loras || 0)} run at once` : "");
    form.hidden = !store.facts.can_load;
    off.hidden = Boolean(store.facts.can_load);
    load.disabled = isBusy;
  }

  return { draw, lead: "where their weights are, and what they do", nodes: [panel("Load an adapter", form, off), panel(null, h("div", { class: "row controls" }, filter, said), error, table.node, empty)] };
}

function label(node, text) {
  if (node.getAttribute("aria-label") !== text) node.setAttribute("aria-label", text);
}
