// The subscriptions of push delivery; and one of them by partition. It can be paused and resumed.

import { get, path, send } from "./api.js";
import { el, note, put, visible } from "./dom.js";
import { bytes, clock, count, span } from "./format.js";
import { to } from "./route.js";
import { DataTable, figure, named } from "./table.js";

export const title = "Subscriptions";

const EVERY_MS = 5000;

export function show(context) {
  context.route.names.length ? showSubscription(context, context.route.names[0]) : showAll(context);
}

function showAll({ root, route, signal, poll }) {
  const table = new DataTable({
    caption: "Subscriptions",
    route,
    key: (row) => row.name,
    sort: "name",
    empty: "There is no subscription whose topics this token may administer.",
    columns: [
      named("name", "Subscription", "subscriptions"),
      { id: "state", label: "State", value: state },
      { id: "topics", label: "Topics", value: (row) => row.topics.join(" ") },
      { id: "url", label: "Receiver" },
      { id: "format", label: "Format" },
      { id: "order", label: "Order" },
      { id: "rejection", label: "On rejection", value: (row) => row.on_rejection },
    ],
  });
  root.append(
    note("What `logferry deliver` sends to HTTP receivers. Stops and lag are on the page of a subscription."),
    table.element,
  );
  poll(async () => table.update((await get("v1/subscriptions", {}, signal)).subscriptions), EVERY_MS);
}

function state(row) {
  if (row.left_configuration) return "left the configuration";
  return row.is_paused ? "paused" : "delivers";
}

function showSubscription({ root, route, signal, poll }, name) {
  const facts = el("dl", { class: "facts" });
  const said = el("p", { role: "status" });
  const [pause, resume] = [
    ["pause", "Pause"],
    ["resume", "Resume, and end all stops"],
  ].map(([act, label]) => el("button", { type: "button", onclick: () => change(act) }, label));
  const ways = el("p", { class: "ways" }, el("a", { href: to("subscriptions") }, "All subscriptions"));
  const table = partitionsTable(route, name);
  root.append(facts, ways, el("p", { class: "acts" }, pause, resume), said, table.element);

  async function change(act) {
    try {
      await send("POST", path`v1/subscriptions/${name}/${act}`);
      put(said, act === "pause" ? "It is paused: nothing is sent until it is resumed." : "It delivers again.");
      refresh();
    } catch (error) {
      put(said, visible(error.message));
    }
  }

  const refresh = poll(async () => {
    const found = await get(path`v1/subscriptions/${name}`, {}, signal);
    pause.disabled = found.is_paused;
    const pairs = [
      ["State", state(found)],
      ["Topics", found.topics.join(", ")],
      ["Receiver", found.url],
      ["Format and order", `${found.format}, by ${found.order}`],
      ["On rejection", found.on_rejection],
      ["Batch", `${bytes(found.max_bytes)} or ${span(found.max_wait_ms / 1000)}`],
      ["Made", clock(found.created_ms)],
      ["Where", found.is_configured ? "in the configuration of deliver" : "by the interface"],
    ];
    put(
      facts,
      pairs.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, visible(text)))),
    );
    table.update(found.partitions);
  }, EVERY_MS);
}

function partitionsTable(route, name) {
  const remark = ({ stop, error }) => {
    if (stop) {
      return `stopped at ${clock(stop.at_ms)}: ${stop.kind}: ${stop.detail}`;
    }
    return error ? `tries again since ${clock(error.at_ms)}: ${error.detail}` : "";
  };
  return new DataTable({
    caption: `Deliveries of ${name}`,
    route,
    key: (row) => `${row.topic} ${row.partition} ${row.shard}`,
    sort: "-lag",
    empty: "Nothing is delivered yet.",
    columns: [
      { id: "topic", label: "Topic" },
      figure("partition", "Partition", String),
      {
        id: "shard",
        label: "Shard",
        value: (row) => row.shard,
        show: (row) => String(row.shard ?? "–"),
        isNumber: true,
      },
      {
        id: "state",
        label: "State",
        value: (row) => (row.stop ? "stopped" : row.error ? "fails" : "delivers"),
        show: (row) =>
          el(
            "span",
            { class: `state ${row.stop || row.error ? "bad" : "good"}` },
            row.stop ? "stopped" : row.error ? "fails" : "delivers",
          ),
      },
      figure("position", "Position", count),
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      { id: "remark", label: "Why", value: remark },
    ],
  });
}
