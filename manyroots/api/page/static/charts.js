// Small charts on a canvas.

import { colour } from "./store.js";

// A canvas whose pixels are the screen's; gives its context, width and height in CSS pixels.
export function prepare(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return { context, width, height };
}

export function niceMax(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((factor) => factor * power >= value);
  return step * power;
}

// Lines over time. `series`: { colour, value(point), fill }.
export function lines(canvas, points, series, { seconds = 120, format = String } = {}) {
  const { context, width, height } = prepare(canvas);
  const left = 46;
  const bottom = 16;
  const plotWidth = width - left - 4;
  const plotHeight = height - bottom - 6;
  const end = points.length ? points[points.length - 1][0] : 0;
  const begin = end - seconds;
  const within = points.filter((point) => point[0] >= begin - 2);
  const max = niceMax(Math.max(0, ...within.flatMap((point) => series.map((line) => line.value(point)))));
  context.textBaseline = "middle";
  context.strokeStyle = colour("--line");
  context.fillStyle = colour("--muted");
  context.lineWidth = 1;
  context.textAlign = "right";
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(6 + plotHeight * (1 - share)) + 0.5;
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(width - 4, y);
    context.stroke();
    context.fillText(format(max * share), left - 6, y);
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`${seconds} s ago`, left, height - 3);
  context.textAlign = "right";
  context.fillText("now", width - 4, height - 3);
  const xOf = (point) => left + (plotWidth * (point[0] - begin)) / seconds;
  const yOf = (value) => 6 + plotHeight * (1 - value / max);
  context.save();
  context.beginPath();
  context.rect(left, 0, plotWidth, height);
  context.clip();
  for (const line of series) {
    if (within.length < 2) continue;
    context.beginPath();
    within.forEach((point, place) => {
      if (place === 0) context.moveTo(xOf(point), yOf(line.value(point)));
      else context.lineTo(xOf(point), yOf(line.value(point)));
    });
    context.strokeStyle = colour(line.colour);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    if (line.fill) {
      context.lineTo(xOf(within[within.length - 1]), yOf(0));
      context.lineTo(xOf(within[0]), yOf(0));
      context.globalAlpha = 0.12;
      context.fillStyle = colour(line.colour);
      context.fill();
      context.globalAlpha = 1;
    }
  }
  context.restore();
}
