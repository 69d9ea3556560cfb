// The mirror of this data centre: its links with their lag, and its partitions; for a stopped one, its way on.

import { get } from "./api.js";
import { el, foreign, note, put, visible } from "./dom.js";
import { bytes, clock, count, rate, secondsAgo, span } from "./format.js";
import { answering, away, shown } from "./findings.js";
import { DataTable, figure } from "./table.js";

export const title = "Mirror";

const EVERY_MS = 5000;

export function show({ root, route, caller, signal, poll, refused }) {
  if (!caller.everything) {
    refused('it takes admin = ["*"], here and in the configuration of the mirror.');
    return;
  }
  const remark = note();
  const missed = el("ul", { class: "findings" });
  const links = linksTable(route);
  const stops = el("ul", { class: "findings" });
  const stopped = el("h2", {}, "Stopped partitions");
  const partitions = partitionsTable(route);
  root.append(
    remark,
    missed,
    el("h2", {}, "Links"),
    links.element,
    stopped,
    stops,
    el("h2", {}, "Partitions"),
    partitions.element,
  );
  poll(async () => {
    const { group, workers } = await get("v1/mirror", {}, signal);
    const { known, silent } = answering(workers);
    const names = Object.keys(workers);
    put(
      remark,
      names.length
        ? `The mirror into ${caller.dc}: ${names.map(visible).join(", ")}.`
        : `No mirror runs in ${caller.dc}: the group ${group} has no member.`,
    );
    put(missed, away(silent, "the mirror").map(shown));
    links.update(known.flatMap((worker) => worker.links.map((one) => ({ ...one, worker: worker.url }))));
    const all = known.flatMap((worker) => worker.partitions.map((one) => ({ ...one, worker: worker.url })));
    partitions.update(all);
    const found = all.filter((one) => one.stop);
    put(stopped, `Stopped partitions: ${count(found.length)}`);
    put(stops, found.slice(0, 100).map(stop));
  }, EVERY_MS);
}

function stop(partition) {
  const { kind, detail, since_ms, what_to_do } = partition.stop;
  const command = `logferry mirror resume ${partition.topic} ${partition.partition} --url ${partition.worker} --from earliest`;
  return el(
    "li",
    { class: "wrong" },
    el("strong", {}, foreign(`${partition.topic}-${partition.partition} of ${partition.dc}: ${kind}`)),
    el("span", { class: "since" }, ` since ${clock(since_ms)}`),
    el("div", {}, foreign(detail)),
    el("div", {}, foreign(what_to_do)),
    el(
      "div",
      {},
      "If it does not resume by itself: ",
      el("code", {}, visible(command)),
      " (--from also takes an offset)",
    ),
  );
}

function linksTable(route) {
  const wait = (row) =>
    row.last_wait === null
      ? "never"
      : `${row.last_wait.ended_ms === null ? "now, since" : "at"} ${clock(row.last_wait.since_ms)}: ${row.last_wait.reason}`;
  return new DataTable({
    caption: "Links, by worker",
    name: "l",
    route,
    key: (row) => `${row.dc} ${row.worker}`,
    sort: "dc",
    empty: "There is no link.",
    columns: [
      { id: "dc", label: "From" },
      { id: "worker", label: "Worker" },
      figure("partitions", "Partitions", count),
      figure("stopped", "Stopped", count),
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      figure("bytes", "In bytes, about", bytes, (row) => row.lag_bytes),
      figure("seconds", "In time", span, (row) => row.lag_s),
      {
        id: "limit",
        label: "Limit",
        value: (row) => row.bytes_per_s,
        show: (row) => (row.bytes_per_s === null ? "none" : rate(row.bytes_per_s).replace("/s", " B/s")),
        isNumber: true,
      },
      { id: "wait", label: "Last wait", value: wait },
    ],
  });
}

function partitionsTable(route) {
  return new DataTable({
    caption: "Mirrored partitions",
    route,
    key: (row) => `${row.topic} ${row.partition}`,
    sort: "-lag",
    empty: "Nothing is mirrored.",
    columns: [
      { id: "topic", label: "Topic" },
      figure("partition", "Partition", String),
      {
        id: "state",
        label: "State",
        value: (row) => row.state,
        show: (row) => el("span", { class: `state ${row.stop ? "bad" : "good"}` }, row.state),
      },
      figure("lag", "Lag in records", count, (row) => row.lag_records),
      figure("bytes", "In bytes", bytes, (row) => row.lag_bytes),
      figure("seconds", "In time", span, (row) => row.lag_s),
      {
        id: "last",
        label: "Last record",
        value: (row) => secondsAgo(row.last_record_ms),
        show: (row) => clock(row.last_record_ms),
        isNumber: true,
      },
    ],
  });
}
