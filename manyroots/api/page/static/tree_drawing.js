// Draws the prefix tree. Runs in a worker, on a canvas that the page has handed over.

import { count } from "./format.js";
import { LEVELS } from "./tree_model.js";

// Colours by tier and age, mixed with the background: the older, the nearer to it.
function palette(colours) {
  const mix = (one) => Array.from({ length: LEVELS }, (_, level) => blend(one, colours.panel, 0.78 * (level / (LEVELS - 1))));
  return { device: mix(colours.device), host: mix(colours.host), none: mix(colours.none) };
}

function blend(one, other, share) {
  const parse = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const [a, b] = [parse(one), parse(other)];
  return `rgb(${a.map((value, place) => Math.round(value * (1 - share) + b[place] * share)).join(" ")})`;
}

function prepare(canvas, { width, height, ratio }) {
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return context;
}

export function drawTree(canvas, tree, { scale: s, size, colours, bands }) {
  const { width, height } = size;
  const context = prepare(canvas, size);
  const c = tree.columns;
  const bottom = height - 18;
  context.save();
  context.beginPath();
  context.rect(s.left, 0, width - s.left, bottom);
  context.clip();
  drawRuns(context, c, s, { width, bottom, colours });
  drawMarks(context, c, s, { bottom, colours });
  context.restore();
  drawBands(context, bands, s, { bottom, ink: colours.ink });
  context.fillStyle = colours.muted;
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`token ${count(s.x * tree.pageSize)}`, s.left, height - 4);
  context.textAlign = "right";
  context.fillText(`${count((s.x + s.width) * tree.pageSize)}`, width - 4, height - 4);
}

function drawRuns(context, c, s, { width, bottom, colours }) {
  const shades = palette(colours);
  let last = "";
  const fill = (style, x, y, w, h) => {
    if (style !== last) context.fillStyle = last = style;
    context.fillRect(x, y, w, h);
  };
  const rows = new Int32Array(Math.ceil(width) + 2).fill(-1); // by column: the last row drawn there
  for (let i = 0; i < c.x.length; i += 1) {
    const y = (c.y[i] - s.y) * s.sy;
    const h = c.leaves[i] * s.sy;
    const x = s.left + (c.x[i] - s.x) * s.sx;
    const w = c.pages[i] * s.sx;
    if (y > bottom || y + h < 0 || x > width) {
      i += c.below[i]; // what is below it is out of sight, too
      continue;
    }
    if (x + w < s.left) continue;
    if (h < 1) {
      // Thinner than a pixel: one run stands for all that begin at the same place.
      const column = Math.max(0, Math.floor(x));
      if (rows[column] === Math.floor(y)) continue;
      rows[column] = Math.floor(y);
    }
    const level = c.level[i];
    const gapY = h > 3 ? 1 : 0;
    const gapX = w > 3 ? 1 : 0;
    const here = c.pages[i] ? Math.min(c.device[i] / c.pages[i], 1) : 0;
    const high = Math.max(h - gapY, 0.7);
    const wide = Math.max(w - gapX, 0.7);
    if (here > 0) fill(shades.device[level], x, y, wide * here, high);
    if (here < 1) fill((c.host[i] ? shades.host : shades.none)[level], x + wide * here, y, wide * (1 - here), high);
    if (c.nodes[i] > 1 && wide > 6 && high > 6) fill(colours.panel, x + 2, y + high / 2 - 1, wide - 4, 2);
  }
}

// Windows and states that are kept.
function drawMarks(context, c, s, { bottom, colours }) {
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
    context.fillStyle = isState ? colours.states : colours.windows;
    context.fillRect(x - (isState ? 1 : 0), isState ? y : y + Math.max(h - 1 - high, 0), Math.max(w - 1, 1.5), isState ? Math.max(h - 1, 0.7) : high);
  }
}

// Whose pages they are, at the left.
function drawBands(context, bands, s, { bottom, ink }) {
  context.textBaseline = "middle";
  context.textAlign = "left";
  let free = 0;
  for (const band of bands) {
    const top = Math.max((band.begin - s.y) * s.sy, 0);
    const end = Math.min((band.end - s.y) * s.sy, bottom);
    if (end <= 0 || top >= bottom) continue;
    context.fillStyle = band.colour;
    context.fillRect(s.left - 6, top, 4, Math.max(end - top - 1, 0.7));
    const middle = Math.max((top + end) / 2, free + 7);
    if (middle > bottom - 6 || (end - top < 4 && middle > end + 10)) continue;
    free = middle + 7;
    context.save();
    context.beginPath();
    context.rect(0, 0, s.left - 10, bottom);
    context.clip();
    context.fillStyle = ink;
    context.fillText(band.text, 0, middle);
    context.restore();
  }
}
