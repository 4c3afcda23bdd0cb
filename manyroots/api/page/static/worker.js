// Reads the stream of events, lays out the tree and draws it, beside the page: so that none of this
// ever keeps a frame waiting. `fetch` and not EventSource, since the key is a header.

import { drawTree } from "./tree_drawing.js";
import { TreeModel } from "./tree_model.js";

let current = null;
const tree = new TreeModel();
let canvas = null;
let drawable = null; // the tree as it was last sent

self.onmessage = ({ data }) => {
  if (data.type === "open") open(data);
  if (data.type === "fake_tree") send(tree.whole(data.tree));
  if (data.type === "canvas") canvas = data.canvas;
  if (data.type === "draw" && drawable) drawTree(canvas, drawable, data);
};

function open({ url, key }) {
  if (current) current.abort();
  const controller = (current = new AbortController());
  read(url, key, controller);
}

async function read(url, key, controller) {
  const say = (message) => {
    if (controller === current) self.postMessage(message);
  };
  let pause = 500;
  while (controller === current) {
    try {
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const answer = await fetch(url, { headers, signal: controller.signal, cache: "no-store" });
      if (!answer.ok) {
        const body = await answer.json().catch(() => ({}));
        say({ type: "refused", code: answer.status, message: body.error?.message || answer.statusText });
        if (answer.status === 401 || answer.status === 403 || answer.status === 404) return;
        throw new Error(`status ${answer.status}`);
      }
      pause = 500;
      say({ type: "open" });
      await events(answer.body, (name, data) => {
        if (controller !== current) return;
        if (name === "tree") send(tree.whole(data));
        else if (name === "tree_change") send(tree.change(data));
        else self.postMessage({ type: name, data });
      });
    } catch (error) {
      if (controller !== current) return;
    }
    say({ type: "lost" });
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, 5000);
  }
}

const DRAWN = ["x", "y", "pages", "leaves", "device", "host", "level", "below", "nodes", "marks"];

function send(laid) {
  // The page takes the columns; drawing keeps copies of those that it needs.
  const columns = Object.fromEntries(DRAWN.map((name) => [name, laid.columns[name].slice()]));
  drawable = { pageSize: laid.pageSize, columns };
  self.postMessage({ type: "tree", tree: laid }, Object.values(laid.columns).map((c) => c.buffer));
}

async function events(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message";
      let data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) take(name, JSON.parse(data));
    }
  }
}
