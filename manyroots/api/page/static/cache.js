// The prefix tree by adapter and tenant. A run of pages is as wide as it has pages; its colour says
// on which tier they are, its brightness when they were last used.

import { h, panel, setText, swatch } from "./dom.js";
import { askWorker } from "./app.js";
import { prepare } from "./charts.js";
import { REQUEST, adapterColour, changed, colour, store } from "./store.js";
import { count, plural } from "./format.js";

const WHOLE = (tree) => ({ x: 0, y: 0, width: tree.width, height: tree.height });

export function cacheView() {
  let view = null; // the part that is shown, in pages and ends of paths
  let zoomed = 0; // the run it was zoomed to, by its number
  let chosen = 0;
  let hovered = -1;
  let drawn = null;
  const canvas = h("canvas", {
    class: "tree-canvas", tabindex: "0", role: "application", "aria-label": "Prefix tree. Arrow keys move between runs of pages, Enter zooms in, Escape zooms out.", "aria-describedby": "node-facts",
    onclick: (event) => { const node = find(event.offsetX, event.offsetY); if (node >= 0) { if (id(node) === chosen) zoom(node); chosen = id(node); changed(); } },
    ondblclick: (event) => { const node = find(event.offsetX, event.offsetY); if (node >= 0) zoom(node); },
    onmousemove: (event) => { const node = find(event.offsetX, event.offsetY); if (node !== hovered) { hovered = node; drawOver(); } moveTip(event); },
    onmouseleave: () => { hovered = -1; drawOver(); },
    onkeydown: onKey,
  });
  // The worker draws the tree, so that no frame of the page waits for it.
  const drawing = canvas.transferControlToOffscreen();
  askWorker({ type: "canvas", canvas: drawing }, [drawing]);
  const over = h("canvas", { class: "tree-canvas tree-over", "aria-hidden": "true" });
  const tip = h("div", { class: "tip", hidden: true });
  const lead = h("p", { class: "muted", role: "status" });
  const out = h("button", { type: "button", class: "small", onclick: () => { view = null; zoomed = 0; changed(); } }, "Show all");
  const facts = h("dl", { class: "facts", id: "node-facts", "aria-live": "polite" });
  const empty = h("p", { class: "empty" }, "Nothing is cached yet.");
  const legend = h("div", { class: "legend" });
  const wrap = h("div", { class: "tree-wrap" }, canvas, over, tip);

  const tree = () => store.tree;
  const id = (node) => tree().columns.id[node];
  const gutter = () => Math.min(170, Math.max(84, canvas.clientWidth * 0.16));

  function scale() {
    const shown = view || WHOLE(tree());
    const left = gutter();
    return { ...shown, left, sx: (canvas.clientWidth - left - 4) / shown.width, sy: Math.min((canvas.clientHeight - 18) / shown.height, 44) };
  }

  function find(px, py) {
    if (!tree() || px < gutter()) return -1;
    const { x, y, left, sx, sy } = scale();
    const atX = x + (px - left) / sx;
    const atY = y + py / sy;
    const c = tree().columns;
    for (let i = tree().size - 1; i >= 0; i -= 1) {
      if (atY >= c.y[i] && atY < c.y[i] + c.leaves[i] && atX >= c.x[i] && atX < c.x[i] + c.pages[i]) return i;
    }
    return -1;
  }

  // Where a run is, by its number: found by halves, since a thousand requests may ask.
  function indexOf(number) {
    if (!tree() || !number) return -1;
    const { id: ids, byId } = tree().columns;
    let low = 0;
    let high = byId.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ids[byId[middle]] < number) low = middle + 1;
      else high = middle;
    }
    return low < byId.length && ids[byId[low]] === number ? byId[low] : -1;
  }

  function zoom(node) {
    const c = tree().columns;
    let widest = c.x[node] + c.pages[node];
    for (let i = node + 1; i <= node + c.below[node]; i += 1) widest = Math.max(widest, c.x[i] + c.pages[i]);
    zoomed = id(node);
    view = { x: c.x[node], y: c.y[node], width: Math.max(widest - c.x[node], 1), height: Math.max(c.leaves[node], 1) };
    changed();
  }

  function onKey(event) {
    if (!tree() || !tree().size) return;
    const c = tree().columns;
    const now = indexOf(chosen);
    let next = now;
    const sibling = (step) => {
      for (let i = now + step; i >= 0 && i < tree().size; i += step) if (c.parent[i] === c.parent[now]) return i;
      return now;
    };
    if (now < 0 && event.key.startsWith("Arrow")) next = 0;
    else if (event.key === "ArrowRight") next = c.below[now] > 0 ? now + 1 : now;
    else if (event.key === "ArrowLeft") next = c.parent[now] >= 0 ? c.parent[now] : now;
    else if (event.key === "ArrowDown") next = sibling(1);
    else if (event.key === "ArrowUp") next = sibling(-1);
    else if (event.key === "Enter" && now >= 0) zoom(now);
    else if (event.key === "Escape") { view = null; zoomed = 0; }
    else return;
    event.preventDefault();
    if (next >= 0) chosen = id(next);
    changed();
  }

  function draw() {
    const known = tree();
    const isEmpty = !known || known.size === 0;
    wrap.hidden = legend.hidden = isEmpty;
    empty.hidden = !isEmpty;
    setText(empty, known ? "Nothing is cached yet." : "Waiting for the tree.");
    out.disabled = !view;
    if (isEmpty) {
      facts.replaceChildren();
      return;
    }
    if (view && zoomed && indexOf(zoomed) < 0) { view = null; zoomed = 0; }
    const shape = `${canvas.clientWidth} ${canvas.clientHeight} ${JSON.stringify(view)} ${colour("--device")}`;
    const isNew = drawn?.tree !== known;
    if (isNew || drawn.shape !== shape) {
      if (isNew && view && zoomed) zoom(indexOf(zoomed));
      askWorker({ type: "draw", scale: scale(), size: { width: canvas.clientWidth, height: canvas.clientHeight, ratio: devicePixelRatio || 1 }, colours: colours(), bands: bands(known) });
      drawn = { tree: known, shape };
    }
    if (isNew) {
      const { pages, hidden } = known;
      setText(lead, `${plural(known.size, "run")} of pages, ${count(pages)} pages on the device${hidden ? `; ${count(hidden)} short runs are counted together` : ""}. ${known.planes.map((p) => `${p[0]} on the ${p[2]}: ${count(p[6])} held, ${count(p[5])} cached, ${count(p[4])} free`).join("; ")}.`);
      drawLegend(legend, known);
    }
    drawOver();
    describe();
  }

  function holders(node) {
    const c = tree().columns;
    const found = [];
    for (const row of store.requests.values()) {
      // What is below a run comes right after it.
      const place = indexOf(row[REQUEST.node]);
      if (place >= node && place <= node + c.below[node]) found.push(row[REQUEST.id]);
    }
    return found;
  }

  function about(node) {
    const known = tree();
    const c = known.columns;
    const space = known.namespaces[c.namespace[node]] || { adapter: null, tenant: 0 };
    const held = holders(node);
    const age = known.tick - c.used[node];
    const before = c.before[node];
    const lines = [
      ["Of", `${space.adapter ?? "base model"}${space.tenant ? `, tenant ${space.tenant}` : ""}`],
      ["Tokens", `${count(c.pages[node] * known.pageSize)} in ${plural(c.pages[node], "page")}, from token ${count(c.x[node] * known.pageSize)} on`],
      ["Where", [c.device[node] ? `${count(c.device[node])} on the device` : "", c.host[node] ? `${count(c.host[node])} on the host` : ""].filter(Boolean).join(", ") || "no page of full attention here"],
      ["Hits", `${plural(c.hits[node], "request")} resumed from here or further on`],
      ["Held by", held.length ? `${held.slice(0, 8).map((number) => `#${number}`).join(", ")}${held.length > 8 ? ` and ${held.length - 8} more` : ""}` : "no request"],
      ["Evicted", held.length ? "not while it is held" : before < 0 ? "after what the order of eviction was read for" : before === 0 ? "next" : `when ${count(before)} more pages are wanted`],
      ["Last used", age <= 0 ? "by the newest request" : `${plural(age, "use")} of the cache ago`],
    ];
    if (c.fork[node]) lines.push(["Shared", "requests went on from here in several ways; evicted last"]);
    if (c.nodes[node] > 1) lines.push(["Together", `${count(c.nodes[node])} short runs`]);
    const kept = marksOf(node);
    if (kept) lines.push(["Kept", kept]);
    return lines;
  }

  function marksOf(node) {
    const { marks } = tree().columns;
    let windows = 0;
    let states = 0;
    for (let i = 0; i < marks.length; i += 4) {
      if (marks[i] !== node) continue;
      if (marks[i + 1]) states += marks[i + 3] - marks[i + 2];
      else windows += marks[i + 3] - marks[i + 2];
    }
    return [windows ? `${plural(windows, "page")} of a window` : "", states ? plural(states, "saved state") : ""].filter(Boolean).join(", ");
  }

  function describe() {
    const node = indexOf(chosen);
    const lines = node < 0 ? [["Choose", "a run of pages, by a click or the arrow keys; a second click zooms in"]] : about(node);
    const text = JSON.stringify(lines);
    if (facts.dataset.text === text) return;
    facts.dataset.text = text;
    facts.replaceChildren(...lines.flatMap(([title, said]) => [h("dt", {}, title), h("dd", {}, said)]));
  }

  // What follows the mouse is on a canvas of its own, so that moving it draws one frame.
  function drawOver() {
    const { context } = prepare(over);
    if (!tree()) return;
    const s = scale();
    const c = tree().columns;
    const frame = (node, variable) => {
      if (node < 0) return;
      context.strokeStyle = colour(variable);
      context.lineWidth = 2;
      context.strokeRect(s.left + (c.x[node] - s.x) * s.sx, (c.y[node] - s.y) * s.sy, Math.max(c.pages[node] * s.sx, 2), Math.max(c.leaves[node] * s.sy, 2));
    };
    frame(indexOf(chosen), "--accent");
    frame(hovered, "--ink");
    tip.hidden = hovered < 0;
    if (hovered >= 0) tip.replaceChildren(h("dl", { class: "facts" }, about(hovered).flatMap(([title, said]) => [h("dt", {}, title), h("dd", {}, said)])));
  }

  function moveTip(event) {
    if (tip.hidden) return;
    const isRight = event.offsetX > canvas.clientWidth / 2;
    tip.style.left = isRight ? "" : `${event.offsetX + 14}px`;
    tip.style.right = isRight ? `${canvas.clientWidth - event.offsetX + 14}px` : "";
    const isLow = event.offsetY > canvas.clientHeight / 2;
    tip.style.top = isLow ? "" : `${event.offsetY + 14}px`;
    tip.style.bottom = isLow ? `${canvas.clientHeight - event.offsetY + 14}px` : "";
  }

  return {
    draw,
    wantsTree: true,
    lead: "what can be reused, by adapter and tenant",
    leave: () => { store.tree = null; },
    nodes: [panel(null, h("div", { class: "row" }, out, lead), wrap, legend, empty), panel("Run of pages", facts)],
  };
}

// What the worker can't know: it sees no style sheet.
function colours() {
  const names = { device: "--device", host: "--host", none: "--c0", panel: "--panel", states: "--states", windows: "--c6", muted: "--muted", ink: "--ink" };
  return Object.fromEntries(Object.entries(names).map(([name, variable]) => [name, colour(variable)]));
}

function bands(tree) {
  return tree.bands.map(({ namespace, begin, end }) => {
    const space = tree.namespaces[namespace] || { adapter: null, tenant: 0 };
    const text = `${space.adapter ?? "base model"}${space.tenant ? ` · tenant ${space.tenant}` : ""}`;
    return { begin, end, text, colour: colour(adapterColour(space.adapter)) };
  });
}

function drawLegend(legend, tree) {
  const entries = [["--device", "on the device"]];
  if (tree.planes.some((plane) => plane[2] === "host")) entries.push(["--host", "on the host"]);
  if (tree.planes.some((plane) => plane[1] === "window")) entries.push(["--c6", "window kept"]);
  if (tree.planes.some((plane) => plane[1] === "state")) entries.push(["--states", "state saved"]);
  legend.replaceChildren(...entries.map(([variable, text]) => h("span", {}, swatch(`var(${variable})`), text)), h("span", {}, "fainter: used longer ago"));
}
