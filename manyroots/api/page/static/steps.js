// The last 500 steps as a timeline; one that is chosen is explained row by row.

import { Table, h, panel, setText, swatch } from "./dom.js";
import { ask } from "./app.js";
import { prepare, niceMax } from "./charts.js";
import { STEP, adapterColour, adapterName, changed, colour, store } from "./store.js";
import { count, milliseconds, plural } from "./format.js";

const SHOWN = 500;
const LEFT = 78;
const LANES = [
  { title: "time", top: 8, height: 92 },
  { title: "rows", top: 112, height: 84 },
  { title: "tokens", top: 208, height: 60 },
  { title: "copies", top: 278, height: 10 },
  { title: "loads", top: 294, height: 10 },
];

export function steps() {
  let chosen = null;
  let explained = null;
  let failure = "";
  const canvas = h("canvas", {
    class: "steps-canvas", tabindex: "0", role: "slider", "aria-label": "Steps; arrow keys choose one",
    "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0",
    onclick: (event) => choose(at(event.offsetX)),
    onkeydown: onKey,
  });
  const lead = h("p", { class: "muted", role: "status" });
  const about = h("dl", { class: "facts" });
  const problem = h("p", { class: "error", role: "alert" });
  const legend = h("div", { class: "legend" });
  const rows = new Table(
    [
      { title: "Request", fill: (node, row) => setText(node, `#${row[0]}`) },
      {
        title: "Adapter", class: "name",
        make: (inner) => {
          const mark = swatch("transparent");
          const name = h("span");
          inner.append(h("span", { class: "tag" }, mark, name));
          return { mark, name };
        },
        fill: ({ mark, name }, row) => {
          setText(name, adapterName(row[1]));
          mark.style.background = `var(${adapterColour(row[1] < 0 ? null : adapterName(row[1]))})`;
        },
      },
      { title: "Computes", fill: (node, row) => setText(node, row[3] ? `${plural(row[3], "prompt token")}${row[2] > row[3] ? ` and ${count(row[2] - row[3])} more` : ""}` : plural(row[2], "next token")) },
      { title: "Since", fill: (node, row) => setText(node, row[4] ? "began in this step" : "ran before") },
    ],
    { caption: "Rows of the chosen step" },
  );
  const detail = panel("Choose a step", h("p", { class: "muted" }, "A click, or the arrow keys, explains what one step computed and why it took its time."), about, problem, rows.node);

  const visible = () => store.steps.slice(-SHOWN);
  const widthOf = (width, number) => Math.min(14, (width - LEFT - 4) / Math.max(number, 1));

  function at(x) {
    const list = visible();
    const place = Math.floor((x - LEFT) / widthOf(canvas.clientWidth, list.length));
    return list[Math.min(Math.max(place, 0), list.length - 1)];
  }

  function onKey(event) {
    const list = visible();
    const place = list.findIndex((step) => step[STEP.id] === chosen);
    const moves = { ArrowLeft: place < 0 ? list.length - 1 : place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1, Home: 0, End: list.length - 1, PageUp: place - 10, PageDown: place + 10 };
    if (!(event.key in moves) || !list.length) return;
    event.preventDefault();
    choose(list[Math.min(Math.max(moves[event.key], 0), list.length - 1)]);
  }

  async function choose(step) {
    if (!step) return;
    chosen = step[STEP.id];
    explained = null;
    failure = "";
    changed();
    try {
      const answer = await ask(`page/step?id=${chosen}`);
      if (answer.step[0] === chosen) {
        Object.assign(store.names, answer.names);
        explained = answer.step;
      }
    } catch (error) {
      failure = error.message;
    }
    changed();
  }

  function draw() {
    const list = visible();
    drawTimeline(canvas, list, chosen, widthOf);
    const names = [...new Set(list.flatMap((step) => step[STEP.adapters].map(([number]) => number)))].sort((a, b) => a - b);
    const shown = names.slice(0, 12).map((number) => h("span", {}, swatch(`var(${adapterColour(number < 0 ? null : adapterName(number))})`), adapterName(number)));
    legend.replaceChildren(...shown, h("span", {}, swatch("var(--prompt)"), "prompt tokens"), h("span", {}, swatch("var(--decode)"), "decode tokens"), h("span", {}, swatch("var(--good)"), "captured graph"));
    if (list.length) {
      const done = list.filter((step) => step[STEP.ms] > 0);
      const mean = done.reduce((sum, step) => sum + step[STEP.ms], 0) / Math.max(done.length, 1);
      const graphs = done.filter((step) => step[STEP.graph]).length;
      setText(lead, `${plural(list.length, "step")}, ${milliseconds(mean)} each on average, ${count(graphs)} of them captured graphs`);
    } else setText(lead, "No step has run yet.");
    const place = list.findIndex((step) => step[STEP.id] === chosen);
    canvas.setAttribute("aria-valuemax", String(Math.max(list.length - 1, 0)));
    canvas.setAttribute("aria-valuenow", String(Math.max(place, 0)));
    canvas.setAttribute("aria-valuetext", place < 0 ? "no step chosen" : said(list[place]));
    explain(list[place]);
  }

  function explain(step) {
    setText(problem, failure);
    rows.node.hidden = !explained;
    if (!step) {
      if (chosen !== null) setText(detail.querySelector("h2"), `Step ${chosen} is no longer among the last ${SHOWN}`);
      return;
    }
    setText(detail.querySelector("h2"), `Step ${step[STEP.id]}`);
    detail.querySelector("p").hidden = true;
    const facts = [
      ["Took", step[STEP.ms] ? `${milliseconds(step[STEP.ms])}, ${step[STEP.graph] ? "as a captured graph" : "kernel by kernel"}` : "still running, or failed"],
      ["Rows", step[STEP.rows] ? step[STEP.adapters].map(([number, n]) => `${adapterName(number)} ${count(n)}`).join(", ") : step[STEP.waits] ? "none: it waited for a copy or a load" : "none: it only moved data"],
      ["Tokens", `${plural(step[STEP.prompt], "prompt token")}, ${plural(step[STEP.decode], "decode token")}, ${plural(step[STEP.drafts], "draft")}`],
      ["Began", plural(step[STEP.arrivals], "request")],
      ["Copies", explained?.[3].length ? explained[3].map(([from, to, n]) => `${plural(n, "unit")} from ${from} to ${to}`).join(", ") : plural(step[STEP.copies], "unit")],
      ["Loads", explained?.[4].length ? explained[4].map(([number, from]) => `${adapterName(number)} from ${from}`).join(", ") : plural(step[STEP.loads], "adapter")],
    ];
    if (about.childElementCount !== 2 * facts.length) about.replaceChildren(...facts.flatMap(() => [h("dt"), h("dd")]));
    facts.forEach(([title, text], place) => {
      setText(about.children[2 * place], title);
      setText(about.children[2 * place + 1], text);
    });
    if (explained) rows.show(explained[1].slice(0, 100));
  }

  return { draw, lead: "how the last ones were spent", nodes: [panel(null, lead, canvas, legend), detail] };
}

const said = (step) => `step ${step[STEP.id]}, ${milliseconds(step[STEP.ms])}, ${plural(step[STEP.rows], "row")}, ${plural(step[STEP.prompt], "prompt token")}, ${plural(step[STEP.decode], "decode token")}`;

function drawTimeline(canvas, list, chosen, widthOf) {
  const { context, width } = prepare(canvas);
  const bar = widthOf(width, list.length);
  const gap = bar > 3 ? 1 : 0;
  const tokens = (step) => step[STEP.prompt] + step[STEP.decode];
  // One step that took far longer than the others must not flatten them.
  const ranked = list.map((step) => step[STEP.ms]).sort((a, b) => a - b);
  const usual = ranked.length ? ranked[Math.floor(0.98 * (ranked.length - 1))] : 1;
  const most = {
    ms: niceMax(Math.max(1e-3, Math.min(ranked[ranked.length - 1] || 1, 2 * usual))),
    rows: niceMax(Math.max(1, ...list.map((step) => step[STEP.rows]))),
    tokens: niceMax(Math.max(1, ...list.map(tokens))),
  };
  context.textBaseline = "middle";
  context.textAlign = "right";
  LANES.forEach(({ title, top, height }, lane) => {
    context.fillStyle = colour("--sunk");
    context.fillRect(LEFT, top, width - LEFT - 4, height);
    context.fillStyle = colour("--muted");
    context.fillText(title, LEFT - 8, top + height / 2);
    if (lane > 2) return;
    context.fillText(lane === 0 ? `${trim(most.ms)} ms` : trim(lane === 1 ? most.rows : most.tokens), LEFT - 8, top + 6);
  });
  const fill = (variable, x, lane, from, part) => {
    const { top, height } = LANES[lane];
    const h = Math.max(height * part, part > 0 ? 1 : 0);
    context.fillStyle = colour(variable);
    context.fillRect(x, top + height - height * from - h, Math.max(bar - gap, 0.6), h);
  };
  list.forEach((step, place) => {
    const x = LEFT + place * bar;
    if (step[STEP.id] === chosen) {
      context.fillStyle = colour("--accent-soft");
      context.fillRect(x - 2, 2, bar + 4, 306);
    }
    fill(step[STEP.graph] ? "--good" : "--c0", x, 0, 0, Math.min(1, step[STEP.ms] / most.ms));
    let from = 0;
    for (const [number, rows] of step[STEP.adapters]) {
      fill(adapterColour(number < 0 ? null : adapterName(number)), x, 1, from, rows / most.rows);
      from += rows / most.rows;
    }
    fill("--prompt", x, 2, 0, step[STEP.prompt] / most.tokens);
    fill("--decode", x, 2, step[STEP.prompt] / most.tokens, step[STEP.decode] / most.tokens);
    if (step[STEP.copies]) fill("--host", x, 3, 0, 1);
    if (step[STEP.loads]) fill("--adapters", x, 4, 0, 1);
    if (step[STEP.id] === chosen) {
      context.strokeStyle = colour("--accent");
      context.lineWidth = 1.5;
      context.strokeRect(x - 1.5, 2, Math.max(bar, 1) + 3, 306);
    }
  });
}

const trim = (value) => (value >= 10 ? String(Math.round(value)) : String(Number(value.toPrecision(2))));
