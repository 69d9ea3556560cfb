// A table that sorts by each column and filters by text. Its state is in the address; rows are kept by their key, so a
// refresh moves no focus. Only a part of the rows is drawn: the filter searches all of them.

import { el, link, put, visible } from "./dom.js";
import { count, plural, rate } from "./format.js";
import { remember, to } from "./route.js";

const DRAWN = 200;

// A column of figures: form makes the text of a value.
export function figure(id, label, form, value = (row) => row[id]) {
  return { id, label, value, show: (row) => form(value(row)), isNumber: true };
}

// A column of names, each of which leads to its page.
export function named(id, label, page) {
  return { id, label, show: (row) => link(to(page, [row[id]]), row[id]) };
}

// A word, and whether it is good.
export function stateColumn(stateOf) {
  return {
    id: "state",
    label: "State",
    value: (row) => stateOf(row)[0],
    show: (row) => {
      const [word, verdict] = stateOf(row);
      return el("span", { class: `state ${verdict}` }, visible(word));
    },
  };
}

// What each table of topics begins with.
export function topicColumns() {
  return [
    named("topic", "Topic", "topics"),
    { id: "dc", label: "Data centre" },
    figure("rate", "Records now", rate),
  ];
}

export class DataTable {
  // columns: id, label, value(row) to sort and filter by (else the row's field), show(row) (a text or an element),
  // isNumber.
  // name: of its parameters in the address, where a page has several tables.
  constructor({ caption, columns, key, route, name = "", sort = "", empty = "Nothing to show." }) {
    columns = columns.map((column) => ({ value: (row) => row[column.id], ...column }));
    Object.assign(this, { columns, key, route, empty });
    const shown = visible(caption);
    this.names = { sort: `${name}sort`, filter: `${name}filter` };
    this.sort = route.params.get(this.names.sort) ?? sort;
    this.rows = [];
    this.drawn = DRAWN;
    this.lines = new Map();
    this.body = el("tbody");
    this.headings = columns.map((column, place) => this.heading(column, place));
    this.filter = el("input", { type: "search", "aria-label": `Filter ${shown}`, placeholder: "Filter" });
    this.filter.value = route.params.get(this.names.filter) ?? "";
    this.filter.addEventListener("input", () => this.changed({ [this.names.filter]: this.filter.value }));
    this.shown = el("span", { class: "shown", role: "status" });
    this.more = el("button", { type: "button", hidden: true, onclick: () => this.drawMore() }, "Show more rows");
    const table = el(
      "table",
      {},
      el("caption", {}, shown),
      el("thead", {}, el("tr", {}, this.headings)),
      this.body,
    );
    this.element = el(
      "section",
      { class: "table" },
      el("div", { class: "tools" }, this.filter, this.shown),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": shown }, table),
      this.more,
    );
    this.draw();
  }

  heading(column, place) {
    const order = () => this.changed({ [this.names.sort]: this.sort === column.id ? `-${column.id}` : column.id });
    const button = el("button", { type: "button", onclick: order }, column.label);
    return el("th", { scope: "col", class: column.isNumber && place > 0 ? "number" : null }, button);
  }

  changed(parameters) {
    this.sort = parameters[this.names.sort] ?? this.sort;
    remember(this.route, parameters);
    this.draw();
  }

  drawMore() {
    this.drawn += DRAWN;
    this.draw();
  }

  update(rows) {
    this.rows = rows;
    this.draw();
  }

  draw() {
    const found = sorted(this.matching(), this.columns, this.sort);
    const drawn = found.slice(0, this.drawn);
    this.columns.forEach((column, place) => {
      const order = { [column.id]: "ascending", [`-${column.id}`]: "descending" }[this.sort];
      this.headings[place].setAttribute("aria-sort", order ?? "none");
    });
    const lines = drawn.length ? drawn.map((row) => this.line(row)) : [this.nothing()];
    place(this.body, lines);
    const keys = new Set(drawn.map(this.key));
    for (const key of [...this.lines.keys()].filter((known) => !keys.has(known))) {
      this.lines.delete(key);
    }
    const all = this.rows.length;
    put(this.shown, found.length === all ? plural(all, "row") : `${count(found.length)} of ${plural(all, "row")}`);
    this.more.hidden = drawn.length === found.length;
  }

  matching() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) {
      return this.rows;
    }
    const texts = (row) =>
      this.columns
        .map((column) => visible(column.value(row) ?? ""))
        .join("\n")
        .toLowerCase();
    return this.rows.filter((row) => {
      const text = texts(row);
      return words.every((word) => text.includes(word));
    });
  }

  line(row) {
    const key = this.key(row);
    let line = this.lines.get(key);
    if (!line) {
      const cells = this.columns.map((column, place) =>
        place === 0 ? el("th", { scope: "row" }) : el("td", { class: column.isNumber ? "number" : null }),
      );
      line = el("tr", {}, cells);
      this.lines.set(key, line);
    }
    this.columns.forEach((column, place) => {
      const value = column.value(row);
      put(line.children[place], column.show ? column.show(row) : visible(value ?? "–"));
    });
    return line;
  }

  nothing() {
    const text = this.rows.length ? "No row matches the filter." : this.empty;
    return el("tr", {}, el("td", { colspan: this.columns.length, class: "empty" }, text));
  }
}

function place(body, lines) {
  lines.forEach((line, at) => {
    if (body.children[at] !== line) {
      body.insertBefore(line, body.children[at] ?? null);
    }
  });
  while (body.children.length > lines.length) {
    body.lastElementChild.remove();
  }
}

// What is not known comes last in either order.
export function sorted(rows, columns, sort) {
  const isDown = sort.startsWith("-");
  const column = columns.find(({ id }) => id === sort.replace(/^-/, ""));
  if (!column) {
    return rows;
  }
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const keyed = rows.map((row) => ({ row, value: column.value(row) ?? null }));
  keyed.sort((one, other) => {
    if (one.value === null || other.value === null) {
      return (one.value === null) - (other.value === null);
    }
    const isText = typeof one.value === "string" || typeof other.value === "string";
    const order = isText ? compare(String(one.value), String(other.value)) : one.value - other.value;
    return isDown ? -order : order;
  });
  return keyed.map(({ row }) => row);
}
