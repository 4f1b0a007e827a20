// Elements, and changing only what differs, so that a selection or the focus survives an update.
// Text goes in as text alone: names and errors of runs come from outside.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

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

/** One element for each text, in order. */
export function listTexts(list, texts, name = "li") {
  while (list.children.length > texts.length) {
    list.lastElementChild.remove();
  }
  texts.forEach((text, index) => {
    if (index >= list.children.length) {
      list.append(element(name));
    }
    setText(list.children[index], text);
  });
}

/**
 * Rows of a table's body. Each row is {cells, kind}: a cell is a text, or {text, kind, title}; the first one heads the
 * row. `labels` are the names of the columns, for screens too narrow for a head.
 */
export function listRows(body, labels, rows) {
  while (body.rows.length > rows.length) {
    body.lastElementChild.remove();
  }
  rows.forEach((row, index) => {
    if (index >= body.rows.length) {
      const cells = labels.map((label, column) =>
        column === 0 ? element("th", { scope: "row" }) : element("td", { "data-label": label }),
      );
      body.append(element("tr", {}, ...cells));
    }
    const line = body.rows[index];
    setAttribute(line, "data-kind", row.kind ?? null);
    row.cells.forEach((cell, column) => {
      const { text, kind = null, title = null } = typeof cell === "object" ? cell : { text: cell };
      setText(line.cells[column], text);
      setAttribute(line.cells[column], "data-kind", kind);
      setAttribute(line.cells[column], "title", title);
    });
  });
}

/** Terms and what they are, in a <dl>: [[term, text, kind], ...]. */
export function listFacts(list, facts) {
  while (list.children.length > facts.length) {
    list.lastElementChild.remove();
  }
  facts.forEach(([term, text, kind = null], index) => {
    if (index >= list.children.length) {
      list.append(element("div", {}, element("dt"), element("dd")));
    }
    const [name, value] = list.children[index].children;
    setText(name, term);
    setText(value, text);
    setAttribute(list.children[index], "data-kind", kind);
  });
}
