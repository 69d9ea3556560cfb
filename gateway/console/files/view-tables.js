// The tables as their loaders report them; and one of them, with the sources that each of its segments waits for.

import { get, path } from "./api.js";
import { el, foreign, note, put, visible } from "./dom.js";
import { ago, clock, count, plural, secondsAgo, span } from "./format.js";
import { to } from "./route.js";
import { DataTable, figure, named, stateColumn } from "./table.js";

export const title = "Tables";

const EVERY_MS = 5000;
// Reports that are missing one after the other.
const MISSED = 5;
// A run that has ended may be one of each day.
const DAILY_S = 26 * 3600;

export function show(context) {
  context.route.names.length ? showTable(context, context.route.names[0]) : showAll(context);
}

function showAll({ root, route, signal, poll }) {
  const table = new DataTable({
    caption: "Tables",
    route,
    key: (row) => row.name,
    sort: "name",
    empty: "No loader reports a table whose topics this token may see: [report] in the loader's configuration.",
    columns: [
      named("name", "Table", "tables"),
      stateColumn(state),
      { id: "location", label: "Location" },
      { id: "topics", label: "Topics", value: (row) => row.topics.join(" ") },
      figure("batch", "Last batch", count, (row) => row.batch?.batch ?? null),
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      figure("quarantined", "Quarantined", count),
      { id: "complete", label: "Complete to", value: (row) => row.complete },
      figure("open", "Open segments", count, (row) => row.open_segments),
      { id: "waits", label: "Waits for", value: (row) => waiting(row.waits_for) },
      { id: "reported", label: "Last report", value: (row) => row.reported_ms, show: (row) => ago(row.reported_ms) },
    ],
  });
  root.append(
    note("As each loader reported it last. The gateway reads no table. Segments are in UTC."),
    table.element,
  );
  poll(async () => table.update((await get("v1/tables", {}, signal)).tables), EVERY_MS);
}

function isStale(row) {
  return secondsAgo(row.reported_ms) > (row.every_s === null ? DAILY_S : MISSED * row.every_s);
}

function state(row) {
  if (isStale(row)) return ["no report", "bad"];
  if (row.error !== null) return ["fails", "bad"];
  if (row.stopped > 0) return ["stopped", "bad"];
  return [row.every_s === null ? "loaded" : "loads", "good"];
}

function waiting(segment) {
  if (!segment) return "";
  const [first, ...others] = segment.waits_for;
  const whom = first ? `${first.source_id} in ${first.topic}` : segment.why;
  return `${segment.segment}: ${whom}${others.length ? ` and ${count(others.length)} more` : ""}`;
}

function showTable({ root, route, signal, poll }, name) {
  const stale = el("p", { class: "trouble", role: "status", hidden: true });
  const facts = el("dl", { class: "facts" });
  const ways = el("p", { class: "ways" }, el("a", { href: to("tables") }, "All tables"));
  const segments = segmentsTable(route, name);
  const topics = topicsTable(route, name);
  root.append(stale, facts, ways, el("h2", {}, "Segments"), segments.element, el("h2", {}, "Topics"), topics.element);
  poll(async () => {
    const found = await get(path`v1/tables/${name}`, {}, signal);
    const stopped = found.lag.filter((one) => one.stopped !== null).length;
    stale.hidden = !isStale(found);
    put(stale, `The last report came ${ago(found.reported_ms)}: the loader does not run, or does not reach the gateway.`);
    put(
      facts,
      factsOf(found, state({ ...found, stopped })[0]).map(([term, text]) =>
        el("div", {}, el("dt", {}, term), el("dd", {}, visible(text))),
      ),
    );
    segments.update([...(found.segments?.newest ?? [])]);
    topics.update(found.lag);
  }, EVERY_MS);
}

function factsOf(found, word) {
  const { batch, segments } = found;
  const rows = batch === null || batch.rows === null ? "" : `, ${plural(batch.rows, "row")}`;
  const quarantined = Object.entries(found.quarantine).map(([reason, number]) => `${count(number)} · ${reason}`);
  const pairs = [
    ["State", word],
    ["Last report", `${ago(found.reported_ms)}, at ${clock(found.reported_ms)}`],
    ["Location", found.location],
    ["Topics", found.topics.join(", ")],
    ["Last batch", batch ? `${batch.batch} (${batch.kind}), planned ${clock(Date.parse(batch.planned))}${rows}` : "none"],
    ["Quarantined", quarantined.join("; ") || "nothing"],
  ];
  if (found.error !== null) pairs.push(["Error", found.error]);
  if (found.lag_unknown !== null) pairs.push(["Lag unknown", found.lag_unknown]);
  if (segments !== null) {
    pairs.push(["Complete to", segments.complete ?? "no segment yet"]);
    pairs.push(["Last check", segments.checked ?? "none yet"]);
    if (segments.failure !== null) pairs.push(["No segment closes", segments.failure]);
  }
  return pairs;
}

function segmentsTable(route, name) {
  const isReady = (row) => row.state === "READY";
  return new DataTable({
    caption: `Segments of ${name}`,
    name: "s",
    route,
    key: (row) => row.segment,
    sort: "-segment",
    empty: "The table has no segments: [tables.segments] in the loader's configuration.",
    columns: [
      { id: "segment", label: "Segment" },
      stateColumn((row) => [row.state, isReady(row) || row.state === "DROPPED" ? "good" : "open"]),
      figure("version", "Version", String),
      figure("rows", "Rows", count),
      { id: "since", label: "Since", value: (row) => row.since },
      {
        id: "waits",
        label: "Waits for",
        value: (row) => row.waits_for.map((one) => `${one.source_id} ${one.topic}`).join(" ") || row.why,
        show: (row) => (row.waits_for.length ? holders(row.waits_for) : visible(row.why)),
      },
    ],
  });
}

function holders(sources) {
  return el(
    "ul",
    { class: "holders" },
    sources.map((one) => {
      const said = one.owes ? "more is recorded than loaded" : `last seen ${one.seen ?? "never"}`;
      return el("li", {}, foreign(one.source_id), ` in ${one.topic}, sent to ${one.at ?? "an unknown time"}, ${said}`);
    }),
  );
}

function topicsTable(route, name) {
  return new DataTable({
    caption: `Topics of ${name}`,
    name: "t",
    route,
    key: (row) => row.topic,
    sort: "-lag",
    empty: "The lag is not known.",
    columns: [
      named("topic", "Topic", "topics"),
      stateColumn((row) => (row.stopped === null ? ["loads", "good"] : ["stopped", "bad"])),
      figure("lag", "Lag in records", count, (row) => row.records),
      figure("age", "Oldest", span, (row) => row.seconds),
      { id: "why", label: "Why, and the way on", value: (row) => [row.stopped, row.way].filter(Boolean).join(": ") },
    ],
  });
}
