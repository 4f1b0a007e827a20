// Elements, and changing only what differs, so that a selection or the focus survives an update.
// Text goes in as text alone: names and errors of runs come from outside.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export const span = (kind, ...children) => element("span", { class: kind }, ...children);

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) {
    node.textContent = text;
  }
}

export function setAttribute(node, name, value) {
  if (value === null) {
    node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

export const show = (node, shown) => {
  node.hidden = !shown;
};

/** Say this in the element of that id, which hides while there is nothing to say. */
export function tell(id, text) {
  setText(byId(id), text);
  show(byId(id), text !== "");
}

/** One child of `holder` for each item, in order: `make(item)` makes one that is missing, `fill(child, item)` each time. */
export function listEach(holder, items, make, fill) {
  while (holder.children.length > items.length) {
    holder.lastElementChild.remove();
  }
  items.forEach((item, index) => {
    if (index >= holder.children.length) {
      holder.append(make(item));
    }
    fill(holder.children[index], item);
  });
}

export const listTexts = (list, texts) => listEach(list, texts, () => element("li"), setText);

/**
 * Rows of a table's body. Each row is {cells, kind}: a cell is a text, or {text, kind, title}; the first one heads the
 * row. Cells bear the names of their columns, for screens too narrow for a head.
 */
export function listRows(body, rows) {
  const labels = [...body.closest("table").tHead.rows[0].cells].map((head) => head.textContent);
  const row = () =>
    element("tr", {}, element("th", { scope: "row" }), ...labels.slice(1).map((label) => element("td", { "data-label": label })));
  listEach(body, rows, row, (line, { cells, kind = null }) => {
    setAttribute(line, "data-kind", kind);
    cells.forEach((cell, column) => {
      const { text, kind = null, title = null } = typeof cell === "object" ? cell : { text: cell };
      setText(line.cells[column], text);
      setAttribute(line.cells[column], "data-kind", kind);
      setAttribute(line.cells[column], "title", title);
    });
  });
}

/** Terms and what they are, in a <dl>: [[term, text, kind], ...]. */
export function listFacts(list, facts) {
  const fact = () => element("div", {}, element("dt"), element("dd"));
  listEach(list, facts, fact, (line, [term, text, kind = null]) => {
    setText(line.children[0], term);
    setText(line.children[1], text);
    setAttribute(line, "data-kind", kind);
  });
}
