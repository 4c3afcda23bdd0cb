// The prefix tree as columns that can be drawn: where each run of pages lies, and what is known of
// it. Runs in a worker. A run is as wide as its pages and as high as the ends of paths below it.

// Brightnesses, by age.
export const LEVELS = 6;

const NODE = { id: 0, parent: 1, namespace: 2, pages: 3, units: 4, used: 5, hits: 6, fork: 7, nodes: 8, marks: 9 };

export class TreeModel {
  constructor() {
    this.nodes = new Map();
    this.head = {};
  }

  whole(tree) {
    this.nodes = new Map(Object.entries(tree.nodes));
    this.head = tree;
    return this.layOut();
  }

  change(change) {
    for (const key of change.gone_nodes) this.nodes.delete(key);
    for (const [key, row] of Object.entries(change.nodes)) this.nodes.set(key, row);
    this.head = change;
    return this.layOut();
  }

  layOut() {
    const { planes, namespaces, tick } = this.head;
    const children = new Map();
    for (const row of this.nodes.values()) {
      const parent = row[NODE.parent];
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(row);
    }
    for (const list of children.values()) list.sort((a, b) => a[NODE.id] - b[NODE.id]);
    const rank = new Map(sorted(namespaces).map((namespace, place) => [namespace[0], place]));
    const place = (row) => rank.get(row[NODE.namespace]) ?? 1e9;
    const roots = (children.get(0) || []).slice();
    roots.sort((a, b) => place(a) - place(b) || a[NODE.id] - b[NODE.id]);
    const order = [];
    const depth = [];
    const parents = [];
    const stack = roots.map((row) => [row, 0, -1]).reverse();
    while (stack.length) {
      const [row, first, parent] = stack.pop();
      const index = order.length;
      order.push(row);
      depth.push(first);
      parents.push(parent);
      const below = children.get(row[NODE.id]) || [];
      for (let i = below.length - 1; i >= 0; i -= 1) stack.push([below[i], first + row[NODE.pages], index]);
    }
    const size = order.length;
    const columns = {
      id: new Float64Array(size),
      parent: Int32Array.from(parents),
      namespace: new Int32Array(size),
      x: Float32Array.from(depth),
      pages: new Float32Array(size),
      y: new Float32Array(size),
      leaves: new Float32Array(size),
      device: new Float32Array(size),
      host: new Float32Array(size),
      used: new Float64Array(size),
      hits: new Float64Array(size),
      below: new Int32Array(size),
      fork: new Uint8Array(size),
      nodes: new Int32Array(size),
      before: new Float64Array(size),
      marks: Int32Array.from(markers(order, planes)),
      level: new Uint8Array(size),
      byId: Uint32Array.from(order.keys()),
    };
    let pages = 0;
    let hidden = 0;
    const device = planes.findIndex((plane) => plane[2] === "device");
    const host = planes.findIndex((plane) => plane[2] === "host");
    const before = this.evictedBefore(planes[device]);
    for (let i = size - 1; i >= 0; i -= 1) {
      const row = order[i];
      columns.id[i] = row[NODE.id];
      columns.namespace[i] = row[NODE.namespace];
      columns.pages[i] = row[NODE.pages];
      columns.device[i] = row[NODE.units][device] || 0;
      columns.host[i] = host < 0 ? 0 : row[NODE.units][host] || 0;
      columns.fork[i] = row[NODE.fork] ? 1 : 0;
      columns.nodes[i] = row[NODE.nodes];
      pages += columns.device[i];
      if (row[NODE.nodes] > 1) hidden += row[NODE.nodes];
      columns.used[i] = Math.max(columns.used[i], row[NODE.used]);
      columns.hits[i] += row[NODE.hits];
      if (!columns.leaves[i]) {
        columns.leaves[i] = 1;
        columns.before[i] = before.get(row[NODE.id]) ?? -1;
      }
      const parent = parents[i];
      if (parent >= 0) {
        columns.leaves[parent] += columns.leaves[i];
        columns.hits[parent] += columns.hits[i];
        columns.below[parent] += 1 + columns.below[i];
        columns.used[parent] = Math.max(columns.used[parent], columns.used[i]);
        const known = columns.before[parent];
        columns.before[parent] = known < 0 || columns.before[i] < 0 ? -1 : Math.max(known, columns.before[i]);
      }
    }
    let top = 0;
    let widest = 1;
    const next = new Float32Array(size);
    for (let i = 0; i < size; i += 1) {
      const parent = parents[i];
      if (parent < 0) {
        columns.y[i] = top;
        top += columns.leaves[i];
      } else {
        columns.y[i] = next[parent];
        next[parent] += columns.leaves[i];
      }
      next[i] = columns.y[i];
      widest = Math.max(widest, columns.x[i] + columns.pages[i]);
    }
    columns.byId.sort((a, b) => columns.id[a] - columns.id[b]);
    fillLevels(columns, tick);
    return {
      size,
      tick,
      pages,
      hidden,
      bands: bands(columns),
      width: widest,
      height: Math.max(top, 1),
      pageSize: this.head.page_size,
      planes,
      namespaces: Object.fromEntries(namespaces.map((n) => [n[0], { adapter: n[1], tenant: n[2] }])),
      columns,
    };
  }

  // Pages that must be wanted before a node goes: what is free, and what goes before it.
  evictedBefore(plane) {
    const before = new Map();
    let pages = plane ? plane[4] : 0;
    for (const [node, count] of this.head.next_evicted) {
      before.set(node, pages);
      pages += count;
    }
    return before;
  }
}

// Ages are very unequal: what counts is their order of magnitude.
function fillLevels({ used, level }, tick) {
  let most = 1;
  for (const at of used) most = Math.max(most, tick - at);
  const whole = Math.log1p(most);
  used.forEach((at, i) => {
    level[i] = Math.min(LEVELS - 1, Math.floor((Math.log1p(Math.max(tick - at, 0)) / whole) * LEVELS));
  });
}

// Whose pages they are, from top to bottom.
function bands({ parent, namespace, y, leaves }) {
  const found = [];
  for (let i = 0; i < parent.length; i += 1) {
    if (parent[i] >= 0) continue;
    const last = found[found.length - 1];
    if (last && last.namespace === namespace[i]) last.end = y[i] + leaves[i];
    else found.push({ namespace: namespace[i], begin: y[i], end: y[i] + leaves[i] });
  }
  return found;
}

function sorted(namespaces) {
  return namespaces.slice().sort((a, b) => {
    if (a[1] !== b[1]) return a[1] === null ? -1 : b[1] === null ? 1 : a[1] < b[1] ? -1 : 1;
    return a[2] - b[2];
  });
}

// Where windows and states are kept: (node, kind, first page, end), one after the other.
function markers(order, planes) {
  const found = [];
  order.forEach((row, index) => {
    const seen = new Set();
    for (let i = 0; i < row[NODE.marks].length; i += 3) {
      const [plane, first, end] = row[NODE.marks].slice(i, i + 3);
      seen.add(plane);
      found.push(index, planes[plane][1] === "state" ? 1 : 0, first, end);
    }
    planes.forEach((plane, number) => {
      if (plane[1] !== "full" && !seen.has(number) && row[NODE.units][number] > 0) {
        found.push(index, plane[1] === "state" ? 1 : 0, 0, row[NODE.pages]);
      }
    });
  });
  return found;
}
