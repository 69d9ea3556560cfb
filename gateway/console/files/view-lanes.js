// The workers of the data centre, their limits, and the lanes with their owners.

import { get } from "./api.js";
import { el, visible } from "./dom.js";
import { ago, bytes, clock, count, secondsAgo, span } from "./format.js";
import { DataTable, figure } from "./table.js";

export const title = "Lanes";

const EVERY_MS = 5000;

export function show({ root, route, caller, signal, poll, refused }) {
  if (!caller.everything) {
    refused('it takes admin = ["*"].');
    return;
  }
  const workers = workersTable(route);
  const lanes = lanesTable(route);
  const brokers = brokersTable(route);
  root.append(
    el("h2", {}, "Workers"),
    workers.element,
    el("h2", {}, "Lanes"),
    lanes.element,
    el("h2", {}, "Kafka"),
    brokers.element,
  );
  poll(async () => {
    const service = await get("v1/workers", {}, signal);
    const entries = Object.entries(service.workers);
    workers.update(entries.map(([url, worker]) => workerRow(url, worker)));
    const known = entries.filter(([, worker]) => worker.lanes);
    lanes.update(laneRows(known));
    brokers.update(brokerRows(known));
  }, EVERY_MS);
}

function workersTable(route) {
  const usage = (id, label, form) => ({
    id,
    label,
    value: (row) => row[id]?.used ?? null,
    show: (row) => (row[id] ? `${form(row[id].used)} of ${form(row[id].limit)}` : "–"),
    isNumber: true,
  });
  return new DataTable({
    caption: "Workers",
    name: "w",
    route,
    key: (row) => row.url,
    sort: "url",
    columns: [
      { id: "url", label: "Worker" },
      { id: "state", label: "State" },
      { id: "version", label: "Version" },
      figure("up", "Up for", span, (row) => row.up_s),
      figure("serving", "Lanes", count),
      usage("process_bytes", "In flight", bytes),
      usage("connections", "Connections", count),
      usage("sessions", "Read sessions", count),
    ],
  });
}

function workerRow(url, worker) {
  if (!worker.lanes) {
    return { url, state: `does not answer: ${worker.error}`, version: null, up_s: null, serving: null };
  }
  const serving = worker.lanes.filter((lane) => lane.state === "serving").length;
  const state = worker.kafka.reachable ? "answers" : "does not reach Kafka";
  const up_s = Math.floor((worker.now_ms - worker.started_ms) / 1000);
  return { url, state, version: worker.version, up_s, serving, ...worker.limits };
}

function lanesTable(route) {
  return new DataTable({
    caption: "Lanes",
    route,
    key: (row) => row.lane,
    sort: "lane",
    columns: [
      figure("lane", "Lane", String),
      {
        id: "state",
        label: "State",
        value: (row) => row.state,
        show: (row) => el("span", { class: `state ${row.state === "serving" ? "good" : "bad"}` }, row.state),
      },
      {
        id: "since",
        label: "For",
        value: (row) => secondsAgo(row.since_ms),
        show: (row) => (row.since_ms ? span(Math.floor(secondsAgo(row.since_ms))) : "–"),
        isNumber: true,
      },
      { id: "worker", label: "Worker", value: (row) => row.url },
      figure("sources", "Sources", count),
      figure("queued", "In flight", bytes, (row) => row.in_flight_bytes),
      figure("committed", "Last commit", ago, (row) => row.committed_ms),
      { id: "why", label: "Why" },
      {
        id: "error",
        label: "Last error",
        value: (row) => row.last_error,
        show: (row) => (row.last_error ? `${clock(row.last_error_ms)}: ${visible(row.last_error)}` : "–"),
      },
    ],
  });
}

export function laneRows(known) {
  const total = Math.max(0, ...known.map(([, worker]) => worker.lanes_total));
  const nobody = {
    state: "served by nobody",
    url: null,
    sources: null,
    in_flight_bytes: null,
    committed_ms: null,
    since_ms: null,
    why: "no worker that answers has it",
    last_error: null,
  };
  const rows = Array.from({ length: total }, (_, lane) => ({ ...nobody, lane }));
  for (const [url, worker] of known) {
    for (const lane of worker.lanes) {
      // After the number became smaller, workers hold lanes beyond it for a moment.
      if (!rows[lane.lane]?.url || lane.state === "serving") {
        rows[lane.lane] = { ...lane, url };
      }
    }
  }
  return rows.filter(() => true); // those between are no lanes
}

function brokersTable(route) {
  return new DataTable({
    caption: "Brokers, by worker",
    name: "b",
    route,
    key: (row) => `${row.worker} ${row.id}`,
    sort: "broker",
    columns: [
      { id: "broker", label: "Broker", value: (row) => `${row.id} (${row.host}:${row.port})` },
      { id: "worker", label: "Seen by" },
      { id: "state", label: "State", value: (row) => row.error ?? "answers" },
    ],
  });
}

function brokerRows(known) {
  return known.flatMap(([worker, status]) => status.kafka.brokers.map((broker) => ({ ...broker, worker })));
}
