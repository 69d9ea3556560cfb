// A live tail of a topic, with filters. It begins with the last records that are there.

import { get } from "./api.js";
import { el, foreign, labelled, note, put, select, visible } from "./dom.js";
import { clock, count, plural } from "./format.js";
import { remember, to } from "./route.js";
import { Tail } from "./tail.js";

export const title = "Live tail";

const EVERY_MS = 1000;
const BEFORE = 20;
const KEPT = 500;
const SHOWN_LETTERS = 4096;

export function show({ root, route, caller, signal, poll, refused }) {
  if (!caller.read) {
    refused("it takes the right to read a topic.");
    return;
  }
  const [topic] = route.names;
  const field = (name, options = {}) => {
    const input = el("input", { type: "text", spellcheck: "false", autocomplete: "off", ...options });
    input.value = route.params.get(name) ?? "";
    return input;
  };
  const fields = {
    partition: field("partition", { inputmode: "numeric", pattern: "[0-9]+", placeholder: "all" }),
    prefix: field("prefix"),
    attribute: field("attribute", { placeholder: "name=value", pattern: "[a-z0-9._\\-]+=.*" }),
    text: field("text"),
  };
  const choice = el("select", {
    onchange: () => (location.hash = to("tail", [choice.value], Object.fromEntries(route.params))),
  });
  const stop = el("button", { type: "button", "aria-pressed": "false", onclick: () => hold() }, "Hold");
  const said = el("p", { class: "note", role: "status" });
  const list = el("ol");
  const log = el(
    "div",
    { class: "log", tabindex: "0", role: "log", "aria-label": "Chunks", "aria-live": "off" },
    list,
  );
  let isHeld = false;
  let tail = begin();
  let shown = 0;

  const apply = (event) => {
    event.preventDefault();
    remember(route, Object.fromEntries(Object.entries(fields).map(([name, input]) => [name, input.value])));
    list.replaceChildren();
    shown = 0;
    tail = begin();
    again();
  };
  root.append(
    el(
      "form",
      { class: "search", onsubmit: apply },
      labelled("Topic", choice),
      labelled("Partition", fields.partition),
      labelled("Source id begins with", fields.prefix),
      labelled("Attribute", fields.attribute),
      labelled("Data contains", fields.text),
      el("button", {}, "Apply"),
      stop,
    ),
    said,
    log,
    note(
      `The last ${KEPT} chunks, read without a consumer: nothing is stored. Source and attribute are filtered by the gateway, the data by this page.`,
    ),
  );

  function begin() {
    const [name, ...value] = fields.attribute.value.split("=");
    const attributes = name ? { [name]: value.join("=") } : {};
    const partition = fields.partition.value === "" ? null : Number(fields.partition.value);
    return new Tail(topic, partition, { sourcePrefix: fields.prefix.value, attributes });
  }

  function hold() {
    isHeld = !isHeld;
    stop.setAttribute("aria-pressed", String(isHeld));
    put(stop, isHeld ? "Continue" : "Hold");
    again();
  }

  async function listTopics() {
    const { topics } = await get("v1/topics", {}, signal);
    const names = topics.map((one) => one.topic);
    const first = topic === undefined ? [["", "choose a topic"]] : names.includes(topic) ? [] : [[topic, topic]];
    put(choice, [...select([...first, ...names.map((name) => [name, visible(name)])], topic ?? "", null).children]);
    choice.value = topic ?? "";
  }

  async function look() {
    if (isHeld || topic === undefined) {
      return;
    }
    const mine = tail;
    const rows = await mine.look(BEFORE, signal);
    if (mine !== tail) {
      return;
    }
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    const wanted = rows.filter((row) => dataOf(row).includes(fields.text.value));
    shown += wanted.length;
    list.append(...wanted.slice(-KEPT).map(entry));
    while (list.childElementCount > KEPT) {
      list.firstElementChild.remove();
    }
    if (isAtEnd) {
      log.scrollTop = log.scrollHeight;
    }
    const left = mine.skipped
      ? `; ${plural(mine.skipped, "record")} left out, because more comes than can be shown`
      : "";
    put(said, `${plural(shown, "chunk")} so far${left}.`);
  }

  let again = () => {};
  poll(listTopics, 60_000);
  again = poll(look, EVERY_MS);
}

function dataOf(row) {
  return row.data ?? `base64 ${row.data_base64}`;
}

function entry(row) {
  const data = dataOf(row).replace(/\n$/, "");
  const cut = data.length > SHOWN_LETTERS;
  const attributes = Object.entries(row.attributes ?? {}).map(([name, value]) =>
    el("span", { class: "attribute" }, foreign(`${name}=${value}`)),
  );
  return el(
    "li",
    {},
    el(
      "div",
      { class: "head" },
      el("time", {}, clock(row.recorded_ms)),
      el("span", {}, `${row.partition}:${row.offset}`),
      el("span", { class: "source" }, foreign(row.source_id)),
      el("span", {}, `seqno ${row.seqno}`),
      attributes,
    ),
    el("pre", { dir: "auto" }, visible(cut ? data.slice(0, SHOWN_LETTERS) : data)),
    cut ? el("div", { class: "small" }, `and ${count(data.length - SHOWN_LETTERS)} letters more`) : null,
  );
}
