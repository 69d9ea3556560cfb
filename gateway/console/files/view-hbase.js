// The subscriptions of HBase as their connectors report them; and one of them, with each region server.

import { get, path } from "./api.js";
import { el, foreign, note, put, visible } from "./dom.js";
import { ago, clock, count, plural, secondsAgo, span } from "./format.js";
import { to } from "./route.js";
import { DataTable, figure, named, stateColumn } from "./table.js";

export const title = "HBase";

const EVERY_MS = 5000;
// Reports that are missing one after the other.
const MISSED = 5;

export function show(context) {
  context.route.names.length ? showOne(context, context.route.names[0]) : showAll(context);
}

function showAll({ root, route, signal, poll }) {
  const table = new DataTable({
    caption: "Subscriptions of HBase",
    route,
    key: (row) => row.name,
    sort: "name",
    empty: "No connector reports a subscription whose topic this token may see: its token needs the right report.",
    columns: [
      named("name", "Subscription", "hbase"),
      stateColumn(state),
      { id: "tables", label: "Tables", value: (row) => row.tables.join(" ") },
      { id: "topic", label: "Topic", value: (row) => row.topics.join(" ") },
      figure("connectors", "Connectors", count),
      figure("servers", "Servers", count),
      figure("logs", "Logs to ship", count),
      milliseconds("age", "Age when shipped", (row) => row.age_ms),
      milliseconds("oldest", "Oldest log", (row) => row.oldest_wal_ms),
      { id: "problems", label: "Problems", value: (row) => row.problems.join("; ") },
      { id: "reported", label: "Last report", value: (row) => row.reported_ms, show: (row) => ago(row.reported_ms) },
    ],
  });
  root.append(note("As a connector of each reported it last. The gateway asks no HBase."), table.element);
  poll(async () => table.update((await get("v1/hbase", {}, signal)).subscriptions), EVERY_MS);
}

function milliseconds(id, label, value) {
  return figure(id, label, (number) => span(number === null ? null : number / 1000), value);
}

function isStale(row) {
  return secondsAgo(row.reported_ms) > MISSED * row.every_s;
}

function state(row) {
  if (isStale(row)) return ["no report", "bad"];
  if (row.state !== "active") return [row.state, "bad"];
  return row.problems.length ? ["has problems", "bad"] : ["active", "good"];
}

function showOne({ root, route, signal, poll }, name) {
  const stale = el("p", { class: "trouble", role: "status", hidden: true });
  const facts = el("dl", { class: "facts" });
  const ways = el("p", { class: "ways" }, el("a", { href: to("hbase") }, "All subscriptions"));
  const servers = serversTable(route, name);
  const connectors = connectorsTable(route, name);
  const headings = ["Region servers", "Connectors"].map((text) => el("h2", {}, text));
  root.append(stale, facts, ways, headings[0], servers.element, headings[1], connectors.element);
  poll(async () => {
    const found = await get(path`v1/hbase/${name}`, {}, signal);
    stale.hidden = !isStale(found);
    put(stale, `The last report came ${ago(found.reported_ms)}: no connector runs, or none reaches the gateway.`);
    put(
      facts,
      factsOf(found).map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, visible(text)))),
    );
    servers.update(found.servers);
    connectors.update(found.connectors);
  }, EVERY_MS);
}

function factsOf(found) {
  return [
    ["State", state(found)[0]],
    ["Last report", `${ago(found.reported_ms)}, at ${clock(found.reported_ms)}`],
    ["Tables", found.tables.join(", ")],
    ["Topic", found.topics.join(", ")],
    ["Problems", found.problems.join("; ") || "none"],
  ];
}

function serversTable(route, name) {
  return new DataTable({
    caption: `Region servers of ${name}`,
    name: "s",
    route,
    key: (row) => row.server,
    sort: "-logs",
    empty: "HBase has no region server.",
    columns: [
      { id: "server", label: "Region server", show: (row) => foreign(row.server) },
      stateColumn((row) => (row.problem === null ? ["answers", "good"] : ["does not answer", "bad"])),
      figure("logs", "Logs to ship", count),
      figure("taken", "Of dead servers", count, (row) => row.taken_over),
      figure("shipped", "Shipped operations", count, (row) => row.shipped_operations),
      milliseconds("age", "Age when shipped", (row) => row.age_ms),
      milliseconds("oldest", "Oldest log", (row) => row.oldest_wal_ms),
      { id: "problem", label: "Problem", value: (row) => row.problem ?? "" },
    ],
  });
}

function connectorsTable(route, name) {
  return new DataTable({
    caption: `Connectors of ${name}`,
    name: "c",
    route,
    key: (row) => row.connector,
    sort: "connector",
    empty: "No connector runs: HBase keeps the changes.",
    columns: [
      { id: "connector", label: "Connector", show: (row) => foreign(row.connector) },
      figure("calls", "Calls done", count),
      figure("refused", "Refused", count, (row) => row.failed_calls),
      figure("chunks", "Chunks recorded", count),
      milliseconds("age", "Lag of the last change", (row) => row.change_age_ms),
      figure("waits", "Call in hand since", span, (row) => row.oldest_call_s),
      {
        id: "waited",
        label: "Region servers that waited",
        value: (row) => row.waits.map((one) => `${one.who} ${one.reason}`).join(" "),
        show: (row) => (row.waits.length ? waits(row.waits) : "none"),
      },
    ],
  });
}

function waits(found) {
  return el(
    "ul",
    { class: "holders" },
    found.map((one) => {
      const text = ` ${plural(one.times, "time")}, the last one ${ago(one.at_ms)}: ${visible(one.reason)}`;
      return el("li", {}, foreign(one.who), text);
    }),
  );
}
