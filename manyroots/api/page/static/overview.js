// Tokens per second, what runs and waits, times, and where the memory is.

import { Table, h, panel, setText, swatch } from "./dom.js";
import { MEMORY, store } from "./store.js";
import { lines } from "./charts.js";
import { bytes, count, milliseconds, percent, rate } from "./format.js";

const TILES = [
  ["Prompt tokens / s", (now) => rate(now.point[1]), (now) => `${count(now.total_in)} in all`],
  ["Output tokens / s", (now) => rate(now.point[2]), (now) => `${count(now.total_out)} in all`],
  ["Running", (now) => count(now.running), (now) => (now.paused ? `${count(now.paused)} paused` : `of ${count(store.facts.max_num_seqs)} rows`)],
  ["Waiting", (now) => count(now.waiting), (now) => `${count(now.retractions)} retractions`],
  ["First token", (now) => milliseconds(now.first_token_ms[0]), (now) => `p99 ${milliseconds(now.first_token_ms[2])}`],
  ["Between tokens", (now) => milliseconds(now.between_ms[0]), (now) => `p99 ${milliseconds(now.between_ms[2])}`],
  ["Prompt reused", (now) => percent(...now.recent_hits), (now) => `${percent(now.hits, now.lookups)} since start`],
];

const text = (title, value, num = true) => ({ title, num, fill: (node, item) => setText(node, value(item)) });
const REPLICAS = [
  text("Replica", (item) => item.number),
  text("State", replicaState, false),
  text("Requests", (item) => count(item.num_open)),
  text("Running", (item) => count(item.num_running)),
  text("Waiting", (item) => count(item.num_waiting)),
  text("Pages held", (item) => percent(item.page_usage, 1)),
  text("Given since start", (item) => count(item.num_requests)),
  text("Restarts", (item) => count(item.num_restarts)),
];

const USES = {
  "weights used": ["--weights", "weights"],
  "adapters used": ["--adapters", "adapters"],
  "adapters free": ["--free", "room for adapters"],
  "pages held": ["--held", "pages held by requests"],
  "pages cached": ["--cached", "pages cached"],
  "pages free": ["--free", "pages free"],
  "states held": ["--states", "states held by requests"],
  "states cached": ["--states-cached", "checkpoints"],
  "states free": ["--free", "states free"],
};

export function overview() {
  const tiles = TILES.map(([title]) => {
    const value = h("dd", {}, "–");
    const sub = h("div", { class: "sub" }, "\u00a0");
    return { node: h("dl", { class: "tile" }, h("dt", {}, title), value, h("dd", { class: "sub" }, sub)), value, sub };
  });
  const tokens = h("canvas", { class: "chart", role: "img", "aria-label": "Prompt and output tokens per second over the last two minutes" });
  const queue = h("canvas", { class: "chart", role: "img", "aria-label": "Running and waiting requests over the last two minutes" });
  const times = h("canvas", { class: "chart", role: "img", "aria-label": "Median time to the first token and between tokens over the last two minutes" });
  const memory = h("div");
  const misses = h("div", { class: "legend" });
  const legend = (...entries) => h("div", { class: "legend" }, entries.map(([variable, text]) => h("span", {}, dot(variable), text)));
  const replicas = new Table(REPLICAS, { caption: "Replicas" });
  const replicaPanel = panel("Replicas", replicas.node, h("div", { class: "legend" }, "The other views show the first replica that is up."));
  replicaPanel.hidden = true;
  let shownMemory = "";

  function draw() {
    const { now, history } = store;
    replicaPanel.hidden = !now.replicas;
    if (now.replicas) replicas.show(now.replicas);
    if (now.point) {
      TILES.forEach(([, value, sub], place) => {
        setText(tiles[place].value, value(now));
        setText(tiles[place].sub, sub(now));
      });
      const missed = Object.entries(now.missed).filter(([, number]) => number > 0);
      setText(
        misses,
        missed.length
          ? `Not reused since start, by reason: ${missed.map(([why, number]) => `${why} ${count(number)}`).join(", ")} tokens. Found on the host: ${count(now.host_hits)}, in storage: ${count(now.storage_hits)}.`
          : "Every prompt token that could be reused was.",
      );
    }
    lines(tokens, history, [{ colour: "--decode", value: (p) => p[2], fill: true }, { colour: "--prompt", value: (p) => p[1] }], { format: short });
    lines(queue, history, [{ colour: "--c3", value: (p) => p[3], fill: true }, { colour: "--c6", value: (p) => p[4] }], { format: short });
    lines(times, history, [{ colour: "--c4", value: (p) => p[5] }, { colour: "--c7", value: (p) => p[6] }], { format: short });
    const wanted = JSON.stringify(store.memory);
    if (wanted !== shownMemory) {
      shownMemory = wanted;
      memory.replaceChildren(...tiers());
    }
  }

  return {
    draw,
    lead: "the last two minutes",
    nodes: [
      h("div", { class: "tiles" }, tiles.map((tile) => tile.node)),
      replicaPanel,
      h(
        "div",
        { class: "grid2" },
        panel("Tokens per second", tokens, legend(["--decode", "output"], ["--prompt", "prompt"])),
        panel("Requests", queue, legend(["--c3", "running"], ["--c6", "waiting"])),
        panel("Median times, ms", times, legend(["--c4", "first token"], ["--c7", "between tokens"])),
        panel("Memory", memory),
      ),
      panel("Reuse", misses),
    ],
  };
}

const short = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : value >= 10 || value === 0 ? String(Math.round(value)) : value.toFixed(1));

function replicaState(item) {
  if (!item.is_up) return "down";
  if (item.is_drained) return "does not answer";
  return item.is_leaving ? "leaving" : "up";
}

function dot(variable) {
  return swatch(`var(${variable})`);
}

function tiers() {
  const byTier = new Map();
  for (const part of store.memory) {
    if (!byTier.has(part[MEMORY.tier])) byTier.set(part[MEMORY.tier], []);
    byTier.get(part[MEMORY.tier]).push(part);
  }
  return [...byTier].map(([tier, parts]) => {
    const whole = parts.reduce((sum, part) => sum + part[MEMORY.bytes], 0);
    const merged = new Map();
    for (const part of parts) {
      const key = `${part[MEMORY.kind]} ${part[MEMORY.use]}`;
      const known = merged.get(key) || [0, 0];
      merged.set(key, [known[0] + part[MEMORY.bytes], known[1] + part[MEMORY.units]]);
    }
    const shown = [...merged].filter(([, [size]]) => size > 0);
    const said = shown.map(([key, [size]]) => `${USES[key][1]} ${bytes(size)}`).join(", ");
    const bar = h("div", { class: "bar", role: "img", "aria-label": `${tier}: ${said}` });
    for (const [key, [size]] of shown) {
      const piece = h("span");
      piece.style.flex = `${size} 0 0px`;
      piece.style.background = `var(${USES[key][0]})`;
      bar.append(piece);
    }
    const legend = shown.map(([key, [size, units]]) =>
      h("span", {}, dot(USES[key][0]), `${USES[key][1]} ${bytes(size)}${key.startsWith("weights") ? "" : ` (${count(units)})`}`),
    );
    return h("div", { class: "tier" }, h("div", { class: "tier-head" }, h("h3", {}, tier), h("span", { class: "muted" }, whole ? `${bytes(whole)} taken` : "nothing here")), bar, h("div", { class: "legend" }, legend));
  });
}
