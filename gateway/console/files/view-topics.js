// The topics, and one topic by partition.

import { get, path } from "./api.js";
import { el, note, put } from "./dom.js";
import { lookAtTopics, rateOf, record } from "./flow.js";
import { bytes, count, plural, rate, retention } from "./format.js";
import { to } from "./route.js";
import { DataTable, figure, topicColumns } from "./table.js";

export const title = "Topics";

const EVERY_MS = 5000;
const RATES =
  "Rates are those since this page was opened, at most of the last half minute. Sizes are the bytes of the " +
  "leader's log in Kafka, compressed; a dash: the broker does not say them, or the gateway may not ask.";

export function show(context) {
  return context.route.names.length ? showTopic(context, context.route.names[0]) : showAll(context);
}

function showAll({ root, route, signal, poll }) {
  const table = new DataTable({
    caption: "Topics",
    route,
    key: (row) => row.topic,
    sort: "topic",
    empty: "There is no topic that this token may see.",
    columns: [
      ...topicColumns(),
      figure("partitions", "Partitions", count),
      figure("leaderless", "Without leader", count),
      figure("records", "Records kept", count),
      figure("size", "Size", bytes),
      {
        id: "retention",
        label: "Retention",
        value: (row) => (row.retention < 0 ? Infinity : row.retention),
        show: (row) => retention(row.retention),
        isNumber: true,
      },
    ],
  });
  root.append(note(RATES), table.element);
  poll(async () => {
    table.update((await lookAtTopics({ sizes: true }, signal)).map(summary));
  }, EVERY_MS);
}

function summary(topic) {
  const led = topic.offsets.filter(({ next }) => next !== null);
  const sized = topic.offsets.filter((one) => one.size_bytes !== null);
  return {
    ...topic,
    leaderless: topic.partitions - led.length,
    records: led.reduce((sum, { first, next }) => sum + next - first, 0),
    size: sized.length ? sized.reduce((sum, one) => sum + one.size_bytes, 0) : null,
    retention: topic.retention_ms,
  };
}

function showTopic({ root, route, caller, signal, poll }, name) {
  const facts = el("p");
  const isOwn = name.startsWith(`${caller.dc}.`);
  const ways = el(
    "p",
    { class: "ways" },
    isOwn ? el("a", { href: to("sources", [name.slice(caller.dc.length + 1)]) }, "Its sources") : null,
    el("a", { href: to("tail", [name]) }, "Live tail"),
    el("a", { href: to("topics") }, "All topics"),
  );
  const table = new DataTable({
    caption: `Partitions of ${name}`,
    route,
    key: (row) => row.partition,
    sort: "partition",
    columns: [
      figure("partition", "Partition", String, (row) => row.partition),
      {
        id: "first",
        label: "First offset",
        value: (row) => row.first,
        show: (row) => (row.first === null ? "no leader" : count(row.first)),
        isNumber: true,
      },
      {
        id: "next",
        label: "Next offset",
        value: (row) => row.next,
        show: (row) => (row.next === null ? "no leader" : count(row.next)),
        isNumber: true,
      },
      figure("records", "Records kept", count),
      figure("size", "Size", bytes, (row) => row.size_bytes),
      figure("rate", "Records now", rate),
    ],
  });
  root.append(facts, ways, note(RATES), table.element);
  poll(async () => {
    const topic = await get(path`v1/topics/${name}`, { sizes: true }, signal);
    const whole = summary(record([topic])[0]);
    put(
      facts,
      `${plural(whole.partitions, "partition")}, ${bytes(whole.size)}, retention ${retention(whole.retention)}, Kafka's id ${topic.id}`,
    );
    table.update(
      topic.offsets.map((one) => ({
        ...one,
        records: one.next === null ? null : one.next - one.first,
        rate: rateOf(name, one.partition),
      })),
    );
  }, EVERY_MS);
}
