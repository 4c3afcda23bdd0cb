// The prefix tree by adapter and tenant. A run of pages is as wide as it has pages; its colour says
// on which tier they are, its brightness when they were last used.

import { h, panel, setText, swatch } from "./dom.js";
import { prepare } from "./charts.js";
import { REQUEST, adapterColour, changed, colour, store } from "./store.js";
import { count, plural } from "./format.js";

const LEVELS = 6;
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

  const indexOf = (number) => (tree() && number ? tree().columns.id.indexOf(number) : -1);

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
    if (drawn?.tree !== known || drawn.shape !== shape) {
      if (drawn?.tree !== known && view && zoomed) zoom(indexOf(zoomed));
      drawTree(canvas, known, scale());
      drawn = { tree: known, shape };
      const c = known.columns;
      let pages = 0;
      let hidden = 0;
      for (let i = 0; i < known.size; i += 1) {
        pages += c.device[i];
        if (c.nodes[i] > 1) hidden += c.nodes[i];
      }
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
      const place = row[REQUEST.node] ? c.id.indexOf(row[REQUEST.node], node) : -1;
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

function drawLegend(legend, tree) {
  const entries = [["--device", "on the device"]];
  if (tree.planes.some((plane) => plane[2] === "host")) entries.push(["--host", "on the host"]);
  if (tree.planes.some((plane) => plane[1] === "window")) entries.push(["--c6", "window kept"]);
  if (tree.planes.some((plane) => plane[1] === "state")) entries.push(["--states", "state saved"]);
  legend.replaceChildren(...entries.map(([variable, text]) => h("span", {}, swatch(`var(${variable})`), text)), h("span", {}, "fainter: used longer ago"));
}

// Colours by tier and age, mixed with the background: the older, the nearer to it.
function palette() {
  const mix = (variable) => Array.from({ length: LEVELS }, (_, level) => blend(colour(variable), colour("--panel"), 0.78 * (level / (LEVELS - 1))));
  return { device: mix("--device"), host: mix("--host"), none: mix("--c0") };
}

function blend(one, other, share) {
  const parse = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parse(one), parse(other)];
  return `rgb(${a.map((value, place) => Math.round(value * (1 - share) + b[place] * share)).join(" ")})`;
}

export function drawTree(canvas, tree, s) {
  const { context, width, height } = prepare(canvas);
  const colours = palette();
  const c = tree.columns;
  const bottom = height - 18;
  const oldest = ageScale(tree);
  context.save();
  context.beginPath();
  context.rect(s.left, 0, width - s.left, bottom);
  context.clip();
  let last = "";
  const fill = (style, x, y, w, h) => {
    if (style !== last) context.fillStyle = last = style;
    context.fillRect(x, y, w, h);
  };
  const rows = new Int32Array(Math.ceil(width) + 2).fill(-1); // by column: the last row drawn there
  for (let i = 0; i < tree.size; i += 1) {
    const y = (c.y[i] - s.y) * s.sy;
    const h = c.leaves[i] * s.sy;
    const x = s.left + (c.x[i] - s.x) * s.sx;
    const w = c.pages[i] * s.sx;
    if (y > bottom || y + h < 0 || x > width || x + w < s.left) continue;
    if (h < 1) {
      // Thinner than a pixel: one run stands for all that begin at the same place.
      const column = Math.max(0, Math.floor(x));
      if (rows[column] === Math.floor(y)) continue;
      rows[column] = Math.floor(y);
    }
    const level = Math.min(LEVELS - 1, Math.floor(oldest(tree.tick - c.used[i]) * LEVELS));
    const gapY = h > 3 ? 1 : 0;
    const gapX = w > 3 ? 1 : 0;
    const here = c.pages[i] ? Math.min(c.device[i] / c.pages[i], 1) : 0;
    const high = Math.max(h - gapY, 0.7);
    const wide = Math.max(w - gapX, 0.7);
    if (here > 0) fill(colours.device[level], x, y, wide * here, high);
    if (here < 1) fill((c.host[i] ? colours.host : colours.none)[level], x + wide * here, y, wide * (1 - here), high);
    if (c.nodes[i] > 1 && wide > 6 && high > 6) {
      fill(colour("--panel"), x + 2, y + high / 2 - 1, wide - 4, 2);
    }
  }
  for (let i = 0; i < c.marks.length; i += 4) {
    const node = c.marks[i];
    const y = (c.y[node] - s.y) * s.sy;
    const h = c.leaves[node] * s.sy;
    if (y > bottom || y + h < 0) continue;
    const isState = c.marks[i + 1] === 1;
    const first = isState ? c.marks[i + 3] - 0.35 : c.marks[i + 2];
    const x = s.left + (c.x[node] + first - s.x) * s.sx;
    const w = (c.marks[i + 3] - first) * s.sx;
    const high = Math.max(Math.min(h - 1, 6), 0.7);
    fill(colour(isState ? "--states" : "--c6"), x - (isState ? 1 : 0), isState ? y : y + Math.max(h - 1 - high, 0), Math.max(w - 1, 1.5), isState ? Math.max(h - 1, 0.7) : high);
  }
  context.restore();
  drawBands(context, tree, s, bottom);
  context.fillStyle = colour("--muted");
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`token ${count(s.x * tree.pageSize)}`, s.left, height - 4);
  context.textAlign = "right";
  context.fillText(`${count((s.x + s.width) * tree.pageSize)}`, width - 4, height - 4);
}

// Ages are very unequal: what counts is their order of magnitude.
function ageScale(tree) {
  let most = 1;
  for (let i = 0; i < tree.size; i += 1) most = Math.max(most, tree.tick - tree.columns.used[i]);
  const whole = Math.log1p(most);
  return (age) => Math.log1p(Math.max(age, 0)) / whole;
}

// Whose pages they are, at the left.
function drawBands(context, tree, s, bottom) {
  const c = tree.columns;
  const bands = [];
  for (let i = 0; i < tree.size; i += 1) {
    if (c.parent[i] >= 0) continue;
    const last = bands[bands.length - 1];
    if (last && last.namespace === c.namespace[i]) last.end = c.y[i] + c.leaves[i];
    else bands.push({ namespace: c.namespace[i], begin: c.y[i], end: c.y[i] + c.leaves[i] });
  }
  context.textBaseline = "middle";
  context.textAlign = "left";
  let free = 0;
  for (const band of bands) {
    const top = Math.max((band.begin - s.y) * s.sy, 0);
    const end = Math.min((band.end - s.y) * s.sy, bottom);
    if (end <= 0 || top >= bottom) continue;
    const space = tree.namespaces[band.namespace] || { adapter: null, tenant: 0 };
    context.fillStyle = colour(adapterColour(space.adapter));
    context.fillRect(s.left - 6, top, 4, Math.max(end - top - 1, 0.7));
    const middle = Math.max((top + end) / 2, free + 7);
    if (middle > bottom - 6 || (end - top < 4 && middle > end + 10)) continue;
    free = middle + 7;
    context.save();
    context.beginPath();
    context.rect(0, 0, s.left - 10, bottom);
    context.clip();
    context.fillStyle = colour("--ink");
    context.fillText(`${space.adapter ?? "base model"}${space.tenant ? ` · tenant ${space.tenant}` : ""}`, 0, middle);
    context.restore();
  }
}
