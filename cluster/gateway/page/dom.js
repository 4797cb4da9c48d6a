// Creating and updating elements.

/** Return an element. Properties that begin with "on" are listeners; `class`, `data-*` and others are attributes. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text only if it differs, so that screen readers and selections are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make the children of `parent` match `items`: keep elements with the same key, and `patch` each with its item. */
export function sync(parent, items, key, create, patch) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const name = String(key(item));
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = create(item);
      child.dataset.key = name;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    patch(child, item);
  });
  for (const child of old.values()) child.remove();
}

/** Show rows as a table. A column is {title, cell(row) -> text or node, number: bool, wide: bool}. */
export function showTable(parent, caption, columns, rows, key) {
  const head = columns.map((column) => column.title).join("|");
  let table = parent.querySelector("table");
  if (!table || table.dataset.head !== head) {
    const titles = columns.map(({ title, number }) => el("th", { scope: "col", class: number && "number" }, title));
    table = el(
      "table", { "data-head": head },
      el("caption"),
      el("thead", {}, el("tr", {}, ...titles)), el("tbody"),
    );
    parent.replaceChildren(table);
  }
  setText(table.caption, caption.text);
  table.caption.className = caption.visible ? "" : "off-screen";
  const create = () => el("tr", {}, ...columns.map(({ title, number }) => el("td", { "data-title": title, class: number && "number" })));
  sync(table.tBodies[0], rows, key, create, (tr, row) => {
    columns.forEach((column, index) => {
      const [cell, value] = [tr.cells[index], column.cell(row)];
      if (typeof value === "string") setText(cell, value);
      else if (!cell.firstChild?.isEqualNode(value)) cell.replaceChildren(value);
    });
  });
}

/** Return a bar that is filled to a share of 1, with its text. */
export function bar(share, text, level = "") {
  const fill = el("i");
  fill.style.width = `${Math.min(100, Math.max(0, share * 100)).toFixed(1)}%`;
  return el("span", { class: "bar", "data-level": level }, el("span", { class: "track" }, fill), el("span", {}, text));
}

const SVG = "http://www.w3.org/2000/svg";

/** Return a line of the newest values, the last at the right; null is a gap. */
export function sparkline(values, slots) {
  const most = Math.max(...values.filter((value) => value !== null), 0);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${slots - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  let [path, drawing] = ["", false];
  values.forEach((value, index) => {
    if (value === null) drawing = false;
    else {
      path += `${drawing ? "L" : "M"}${slots - values.length + index} ${most ? (19 - (18 * value) / most).toFixed(1) : 19}`;
      drawing = true;
    }
  });
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}
