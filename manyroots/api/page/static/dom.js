// Elements without markup: text is always text, so that no name can become a script.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// A table whose rows are made once and then only changed where they differ.
export class Table {
  constructor(columns, { caption, cards = true } = {}) {
    this.columns = columns;
    this.body = h("tbody");
    const heads = columns.map((column) =>
      h("th", { scope: "col", class: column.num ? "num" : null }, column.title),
    );
    this.table = h(
      "table",
      { class: cards ? "cards" : null, "aria-label": caption },
      h("thead", {}, h("tr", {}, heads)),
      this.body,
    );
    this.node = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, this.table);
  }

  show(items) {
    while (this.body.rows.length > items.length) this.body.deleteRow(-1);
    items.forEach((item, index) => {
      let row = this.body.rows[index];
      if (!row) {
        row = this.body.insertRow();
        row.fields = this.columns.map((column) => {
          const cell = row.insertCell();
          cell.className = column.num ? "num" : column.class || "";
          cell.dataset.label = column.title;
          const inner = h("div");
          cell.append(inner);
          return column.make ? column.make(inner, () => row.item) : inner;
        });
      }
      row.item = item;
      this.columns.forEach((column, place) => column.fill(row.fields[place], item));
    });
  }
}

export function panel(title, ...children) {
  return h("section", { class: "panel" }, title ? h("h2", {}, title) : null, children);
}

export function swatch(colour) {
  const node = h("i", { class: "swatch", "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}
