// The consumers with their lag; and one consumer by partition, whose positions can be set after a preview.

import { get, path, send } from "./api.js";
import { el, labelled, note, put, select, visible } from "./dom.js";
import { bytes, count, plural, span } from "./format.js";
import { to } from "./route.js";
import { DataTable, figure, named } from "./table.js";

export const title = "Consumers";

const EVERY_MS = 5000;
// Of so many partitions that lag the page asks for bytes and seconds, too.
const MOST_READ = 100;
const BYTES = "Bytes beyond 64 KiB of a partition are an estimate.";
const MANY = `Bytes and seconds are shown of at most ${MOST_READ} partitions that lag.`;
const PLACES = [
  ["earliest", "the earliest record kept"],
  ["latest", "the end"],
  ["time", "a time"],
  ["offset", "an offset"],
];

export function show(context) {
  if (!context.caller.read) {
    context.refused("it takes the right to read a topic.");
    return;
  }
  context.route.names.length ? showConsumer(context, context.route.names[0]) : showAll(context);
}

function showAll({ root, route, signal, poll }) {
  const remark = note();
  const table = new DataTable({
    caption: "Consumers",
    route,
    key: (row) => row.consumer,
    sort: "-lag",
    empty: "No consumer has a position in a topic that this token may read.",
    columns: [
      named("consumer", "Consumer", "consumers"),
      { id: "state", label: "State" },
      {
        id: "topics",
        label: "Topics",
        value: (row) => row.topics.join(" "),
        show: (row) => visible(some(row.topics)),
      },
      figure("partitions", "Partitions", count),
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      figure("outside", "Not kept any more", count, (row) => row.out_of_range),
    ],
  });
  root.append(remark, table.element);
  poll(async () => {
    const { consumers, complete } = await get("v1/consumers", {}, signal);
    const missing = complete ? "" : " A broker does not answer: consumers are missing from this list.";
    put(remark, `Lag counts offsets. A consumer's page has it in bytes and seconds, too.${missing}`);
    table.update(consumers);
  }, EVERY_MS);
}

function some(names) {
  return names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
}

function showConsumer({ root, route, signal, poll }, name) {
  const facts = el("p");
  const table = new DataTable({
    caption: `Positions of ${name}`,
    route,
    key: (row) => `${row.topic} ${row.partition}`,
    sort: "-lag",
    empty: "It has no position in a topic that this token may read.",
    columns: [
      { id: "topic", label: "Topic" },
      figure("partition", "Partition", String),
      {
        id: "offset",
        label: "Position",
        value: (row) => row.offset,
        show: (row) => (row.offset === null ? "none" : count(row.offset)),
        isNumber: true,
      },
      {
        id: "next",
        label: "End",
        value: (row) => row.next,
        show: (row) => (row.next === null ? "no leader" : count(row.next)),
        isNumber: true,
      },
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      figure("bytes", "In bytes", bytes, (row) => row.lag_bytes),
      {
        id: "seconds",
        label: "In time",
        value: (row) => row.lag_seconds ?? (row.lag_records === 0 ? 0 : null),
        show: (row) => span(row.lag_seconds ?? (row.lag_records === 0 ? 0 : null)),
        isNumber: true,
      },
      {
        id: "outside",
        label: "Remark",
        value: (row) => (row.out_of_range ? "its position is not kept any more" : ""),
      },
    ],
  });
  const reset = resetForm(name, () => table.rows);
  const ways = el("p", { class: "ways" }, el("a", { href: to("consumers") }, "All consumers"));
  root.append(facts, ways, table.element, reset.element);
  reset.refresh = poll(async () => {
    // Bytes and seconds take a read of each partition that lags.
    let found = await get(path`v1/consumers/${name}/offsets`, { records_only: true }, signal);
    const lagging = found.positions.filter((row) => row.lag_records).length;
    const isMany = lagging > MOST_READ;
    if (lagging && !isMany) {
      found = await get(path`v1/consumers/${name}/offsets`, {}, signal);
    }
    const lag = found.positions.reduce((sum, row) => sum + (row.lag_records ?? 0), 0);
    put(
      facts,
      `${found.state}, ${plural(found.members, "member")}, ${plural(lag, "record")} behind. ${
        isMany ? MANY : BYTES
      }`,
    );
    table.update(found.positions);
    reset.update(found);
  }, EVERY_MS);
}

// ---- reset ----------------------------------------------------------------------------------------------------------

function resetForm(name, positions) {
  const topic = el("select");
  const place = select(PLACES, "earliest", () => adapt());
  const time = el("input", { type: "datetime-local", step: "1" });
  const offset = el("input", { type: "text", inputmode: "numeric", pattern: "[0-9]+", maxlength: 19 });
  const [timeField, offsetField] = [labelled("Local time", time), labelled("Offset, of every partition", offset)];
  const said = el("p", { role: "status" });
  const preview = el("div");
  const form = { element: null, update, refresh: () => {} };
  let wanted = [];

  function adapt() {
    timeField.hidden = place.value !== "time";
    offsetField.hidden = place.value !== "offset";
    forget();
  }

  function forget() {
    wanted = [];
    preview.replaceChildren();
    put(said, "");
  }

  function update(found) {
    const names = [...new Set(found.positions.map((row) => row.topic))].sort();
    const chosen = topic.value;
    put(
      topic,
      names.map((one) => el("option", { value: one }, visible(one))),
    );
    if (names.includes(chosen)) {
      topic.value = chosen;
    }
  }

  function body() {
    if (place.value === "time") {
      return { topic: topic.value, to: new Date(time.value).getTime() };
    }
    if (place.value === "offset") {
      const rows = positions().filter((row) => row.topic === topic.value);
      return {
        positions: rows.map((row) => ({
          topic: row.topic,
          partition: row.partition,
          offset: Number(offset.value),
        })),
      };
    }
    return { topic: topic.value, to: place.value };
  }

  async function look(event) {
    event.preventDefault();
    forget();
    try {
      const answer = await send("PUT", path`v1/consumers/${name}/offsets`, {
        body: body(),
        query: { dry_run: true },
      });
      wanted = answer.positions;
      const current = new Map(positions().map((row) => [`${row.topic} ${row.partition}`, row]));
      const rows = wanted.map((row) => difference(row, current.get(`${row.topic} ${row.partition}`)));
      const [again, skipped] = ["again", "skipped"].map((kind) => rows.reduce((sum, row) => sum + row[kind], 0));
      put(
        said,
        `Nothing is set yet. ${plural(again, "record")} would be read again, ${plural(skipped, "record")} skipped.`,
      );
      preview.replaceChildren(
        previewTable(rows),
        el("button", { type: "button", class: "danger", onclick: set }, "Set these positions"),
      );
    } catch (error) {
      put(said, visible(error.message));
    }
  }

  async function set() {
    try {
      const answer = await send("PUT", path`v1/consumers/${name}/offsets`, { body: { positions: wanted } });
      forget();
      put(said, `${plural(answer.positions.length, "position")} set.`);
      form.refresh();
    } catch (error) {
      put(said, `Nothing was set: ${visible(error.message)}`);
    }
  }

  topic.addEventListener("change", forget);
  for (const input of [time, offset]) {
    input.addEventListener("input", forget);
  }
  form.element = el(
    "section",
    { "aria-labelledby": "reset" },
    el("h2", { id: "reset" }, "Set its positions"),
    note("Only while the consumer has no member. The preview changes nothing; what it shows is what is set."),
    el(
      "form",
      { class: "search", onsubmit: look },
      labelled("Topic", topic),
      labelled("To", place),
      timeField,
      offsetField,
      el("button", {}, "Preview"),
    ),
    said,
    preview,
  );
  adapt();
  return form;
}

function difference(row, current) {
  const at = current?.offset ?? current?.first ?? null;
  const step = at === null ? 0 : row.offset - at;
  return { ...row, at: current?.offset ?? null, again: Math.max(0, -step), skipped: Math.max(0, step) };
}

function previewTable(rows) {
  const cells = (row) => [
    row.partition,
    row.at === null ? "none" : count(row.at),
    count(row.offset),
    count(row.again),
    count(row.skipped),
  ];
  const heads = ["Partition", "Position now", "Would be", "Read again", "Skipped"];
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Preview" },
    el(
      "table",
      {},
      el("caption", {}, "Preview"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((head) => el("th", { scope: "col", class: "number" }, head)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            cells(row).map((cell) => el("td", { class: "number" }, String(cell))),
          ),
        ),
      ),
    ),
  );
}
