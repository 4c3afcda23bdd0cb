// What the server has told so far, and which views want to know of changes.

export const store = {
  facts: {},
  now: {},
  history: [],
  requests: new Map(),
  adapters: new Map(),
  steps: [],
  names: {},
  memory: [],
  settings: {},
  tree: null,
  status: "connecting",
};

const MAX_STEPS = 500;
const MAX_POINTS = 600;
const listeners = new Set();

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// One drawing for all that changed since the last frame.
let isQueued = false;
export function changed() {
  if (isQueued) return;
  isQueued = true;
  requestAnimationFrame(() => {
    isQueued = false;
    for (const listener of [...listeners]) listener();
  });
}

export function takeState(state) {
  store.facts = state.facts;
  store.now = state.now;
  store.history = state.history;
  store.requests = new Map(Object.entries(state.requests));
  store.adapters = new Map(Object.entries(state.adapters));
  store.steps = state.steps;
  store.names = state.names;
  store.memory = state.memory;
  store.settings = state.settings;
  changed();
}

export function takeChange(change) {
  store.now = change.now;
  if (change.now.point) {
    store.history.push(change.now.point);
    if (store.history.length > MAX_POINTS) store.history.shift();
  }
  for (const section of ["requests", "adapters"]) {
    for (const key of change[`gone_${section}`] || []) store[section].delete(key);
    for (const [key, row] of Object.entries(change[section] || {})) store[section].set(key, row);
  }
  if (change.steps) {
    const known = new Set(change.steps.map((step) => step[0]));
    store.steps = [...store.steps.filter((step) => !known.has(step[0])), ...change.steps].slice(-MAX_STEPS);
  }
  Object.assign(store.names, change.names);
  if (change.memory) store.memory = change.memory;
  if (change.settings) store.settings = change.settings;
  changed();
}

// Columns of the rows, as the server sends them.
export const STEP = { id: 0, at: 1, ms: 2, rows: 3, prompt: 4, decode: 5, drafts: 6, arrivals: 7, copies: 8, loads: 9, graph: 10, waits: 11, adapters: 12 };
export const REQUEST = { id: 0, adapter: 1, tenant: 2, state: 3, wait: 4, reason: 5, priority: 6, prompt: 7, computed: 8, output: 9, maxOutput: 10, cached: 11, host: 12, storage: 13, limit: 14, pages: 15, node: 16, came: 17 };
export const ADAPTER = { name: 0, digest: 1, tier: 2, state: 3, pinned: 4, draining: 5, rank: 6, bytes: 7, running: 8, waiting: 9, loads: 10, pauses: 11, requests: 12, prompt: 13, cached: 14, path: 15 };
export const MEMORY = { tier: 0, kind: 1, family: 2, use: 3, bytes: 4, units: 5 };

export function adapterName(number) {
  return number < 0 ? store.facts.model || "base model" : store.names[number] || `adapter ${number}`;
}

// Colours by adapter, the same in all views: the base model is grey.
const order = new Map();
export function adapterColour(name) {
  if (name === null || name === undefined || name === store.facts.model) return "--c0";
  if (!order.has(name)) order.set(name, order.size);
  return `--c${(order.get(name) % 8) + 1}`;
}

let theme = null;
const cache = new Map();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  theme = null;
  cache.clear();
  changed();
});

export function colour(variable) {
  if (!cache.has(variable)) {
    theme = theme || getComputedStyle(document.documentElement);
    cache.set(variable, theme.getPropertyValue(variable).trim());
  }
  return cache.get(variable);
}
