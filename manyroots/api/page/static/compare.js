// A chat that asks the base model and up to three adapters side by side, by the ordinary API.

import { h, panel, setText, swatch } from "./dom.js";
import { headers } from "./app.js";
import { ADAPTER, adapterColour, changed, store } from "./store.js";
import { count, milliseconds } from "./format.js";

const MOST = 3;

export function compare() {
  const chosen = new Set();
  let talks = [];
  let running = null;
  const names = h("div", { class: "row", role: "group", "aria-label": "Adapters to ask, at most three" });
  const base = h("input", { type: "checkbox", checked: true });
  base.checked = true;
  const text = h("textarea", { rows: "3", id: "compare-text", placeholder: "Ask all of them the same thing" });
  const limit = h("input", { type: "number", min: "1", max: "4096", value: "128", "aria-label": "Most output tokens", size: "5" });
  const warmth = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0", "aria-label": "Temperature", size: "4" });
  const send = h("button", { type: "submit", class: "primary" }, "Ask");
  const stop = h("button", { type: "button", onclick: () => running?.abort() }, "Stop");
  const anew = h("button", { type: "button", onclick: () => { running?.abort(); talks = []; answers.replaceChildren(); } }, "New chat");
  const error = h("p", { class: "error", role: "alert" });
  const answers = h("div", { class: "answers", "aria-live": "polite" });
  const form = h(
    "form",
    { onsubmit: (event) => { event.preventDefault(); askAll(); } },
    h("div", { class: "row" }, h("label", { class: "check" }, base, "base model"), names),
    h("p", {}, h("label", { for: "compare-text" }, "Message"), text),
    h("div", { class: "row" }, send, stop, anew, h("label", { class: "check" }, "at most", limit, "tokens"), h("label", { class: "check" }, "temperature", warmth)),
  );
  let shown = "";

  function wanted() {
    const list = [...chosen].map((name) => ({ model: name, title: name, adapter: name }));
    return base.checked ? [{ model: store.facts.model, title: "base model", adapter: null }, ...list] : list;
  }

  async function askAll() {
    setText(error, "");
    const message = text.value.trim();
    const models = wanted();
    if (!message || !models.length) {
      setText(error, message ? "Choose a model to ask." : "Write a message first.");
      return;
    }
    if (talks.map((talk) => talk.model).join() !== models.map((one) => one.model).join()) {
      talks = models.map((one) => ({ ...one, messages: [], node: h("section", { class: "panel talk" }, h("h3", { class: "row" }, swatch(`var(${adapterColour(one.adapter)})`), one.title)) }));
      answers.replaceChildren(...talks.map((talk) => talk.node));
    }
    running?.abort();
    running = new AbortController();
    const { signal } = running;
    text.value = "";
    await Promise.all(talks.map((talk) => askOne(talk, message, signal)));
    if (running?.signal === signal) running = null;
    changed();
  }

  async function askOne(talk, message, signal) {
    talk.messages.push({ role: "user", content: message });
    const said = h("div", { class: "said" });
    const measured = h("div", { class: "measured" }, "asked");
    talk.node.append(h("div", { class: "said mine" }, message), said, measured);
    changed();
    const begin = performance.now();
    let first = 0;
    let usage = null;
    try {
      const body = { model: talk.model, messages: talk.messages, max_tokens: Number(limit.value) || 128, temperature: Number(warmth.value) || 0, stream: true, stream_options: { include_usage: true } };
      const answer = await fetch("v1/chat/completions", { method: "POST", headers: { ...headers("api"), "content-type": "application/json" }, body: JSON.stringify(body), signal });
      if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message || `the server answered ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          if (!part.startsWith("data: {")) continue;
          const event = JSON.parse(part.slice(6));
          if (event.error) throw new Error(event.error.message);
          usage = event.usage || usage;
          const delta = event.choices?.[0]?.delta;
          const piece = (delta?.reasoning_content || "") + (delta?.content || "");
          if (piece && !first) first = performance.now() - begin;
          if (piece) said.append(piece);
        }
      }
      talk.messages.push({ role: "assistant", content: said.textContent });
    } catch (failure) {
      talk.messages.pop();
      if (failure.name !== "AbortError") {
        said.append(failure.message);
        said.className = "said failed";
      }
    }
    const total = performance.now() - begin;
    const prompt = usage?.prompt_tokens || 0;
    const tokens = usage?.completion_tokens || 0;
    const cached = usage?.prompt_tokens_details?.cached_tokens || 0;
    const speed = tokens > 1 ? `, ${(((tokens - 1) * 1000) / Math.max(total - first, 1)).toFixed(1)} tokens/s` : "";
    setText(measured, usage ? `${count(cached)} of ${count(prompt)} prompt tokens cached · first token ${milliseconds(first)} · ${count(tokens)} tokens in ${milliseconds(total)}${speed}` : "no usage was told");
  }

  function draw() {
    const list = [...store.adapters.values()].filter((row) => !row[ADAPTER.draining]).map((row) => row[ADAPTER.name]);
    const key = JSON.stringify([list, [...chosen]]);
    if (key !== shown) {
      shown = key;
      names.replaceChildren(
        ...list.slice(0, 60).map((name) => {
          const box = h("input", { type: "checkbox", onchange: () => { if (box.checked) chosen.add(name); else chosen.delete(name); changed(); } });
          box.checked = chosen.has(name);
          box.disabled = !box.checked && chosen.size >= MOST;
          return h("label", { class: "check" }, box, swatch(`var(${adapterColour(name)})`), name);
        }),
      );
    }
    stop.disabled = !running;
    if (store.facts.model && store.facts.has_chat === false) setText(error, "This model has no chat template, so that it can't be asked in a chat.");
  }

  return { draw, lead: "the same question, side by side", nodes: [panel(null, form, error), answers], leave: () => running?.abort() };
}
