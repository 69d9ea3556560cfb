// The sources of a topic: search, silence, how far behind; and one source, with what is recorded here and elsewhere.

import { get, path } from "./api.js";
import { el, foreign, labelled, link, note, put, select, visible } from "./dom.js";
import { ago, bytes, clock, count, secondsAgo, span } from "./format.js";
import { remember, to } from "./route.js";
import { DataTable, figure, named } from "./table.js";

export const title = "Sources";

const EVERY_MS = 10_000;
// Pages of 1,000 sources each.
const PAGES = 10;
const SILENT = [
  ["", "all"],
  ["60000", "silent for 1 minute"],
  ["600000", "silent for 10 minutes"],
  ["3600000", "silent for 1 hour"],
  ["86400000", "silent for 1 day"],
];

export function show(context) {
  const [topic, source] = context.route.names;
  if (source !== undefined) {
    return showSource(context, topic, source);
  }
  return topic === undefined ? chooseTopic(context) : showAll(context, topic);
}

function chooseTopic({ root, caller, signal, route, poll }) {
  const table = new DataTable({
    caption: "Topics with sources",
    route,
    key: (row) => row.topic,
    sort: "name",
    empty: "There is no topic of this data centre that this token may see.",
    columns: [
      named("name", "Topic", "sources"),
      figure("partitions", "Partitions", count),
    ],
  });
  root.append(
    note(`Choose a topic that is written in ${caller.dc}. Sources of other data centres are listed there.`),
    table.element,
  );
  poll(async () => {
    const { topics } = await get("v1/topics", {}, signal);
    table.update(topics.filter((topic) => topic.dc === caller.dc));
  }, EVERY_MS);
}

function showAll({ root, route, signal, poll }, topic) {
  const prefix = el("input", { type: "search", maxlength: 512, spellcheck: "false" });
  prefix.value = route.params.get("prefix") ?? "";
  const silent = select(SILENT, route.params.get("silent") ?? "", () => search());
  const found = note();
  const table = sourcesTable(route, topic);
  let again = () => {};

  function search() {
    remember(route, { prefix: prefix.value, silent: silent.value });
    again();
  }

  const submit = (event) => {
    event.preventDefault();
    search();
  };
  root.append(
    el(
      "form",
      { class: "search", role: "search", onsubmit: submit },
      labelled("Source id begins with", prefix),
      labelled("Show", silent),
      el("button", {}, "Search"),
    ),
    found,
    table.element,
  );

  async function load() {
    const wanted = { prefix: prefix.value, idle_for_ms: silent.value };
    const rows = [];
    let after = "";
    for (let page = 0; page < PAGES && after !== null; page += 1) {
      const answer = await get(path`v1/topics/${topic}/sources`, { ...wanted, after }, signal);
      rows.push(...answer.sources);
      after = answer.next;
    }
    if (prefix.value === wanted.prefix && silent.value === wanted.idle_for_ms) {
      table.update(rows.map(figures));
      const first = after === null ? "" : `The first ${count(rows.length)} of more: narrow the search. `;
      put(found, `${first}Behind is the part of the file that the source has not sent, by its last heartbeat.`);
    } else {
      await load();
    }
  }

  again = poll(load, EVERY_MS);
}

function figures(row) {
  const heard = Math.max(row.written_ms, row.heartbeat_ms ?? 0);
  const behind = row.position === null || row.size === null ? null : Math.max(0, row.size - row.position);
  return { ...row, heard, silent_s: secondsAgo(heard), behind, event_age_s: secondsAgo(row.watermark_ms) };
}

function sourcesTable(route, topic) {
  const show = (row) => link(to("sources", [topic, row.source_id], { key: row.partition_key }), row.source_id);
  return new DataTable({
    caption: `Sources of ${topic}`,
    route,
    key: (row) => JSON.stringify([row.source_id, row.partition_key]),
    sort: "source",
    empty: "No source matches the search.",
    columns: [
      { id: "source", label: "Source", value: (row) => row.source_id, show },
      {
        id: "key",
        label: "Key",
        value: (row) => row.partition_key,
        show: (row) => (row.partition_key === null ? "–" : foreign(row.partition_key)),
      },
      figure("partition", "Partition", count),
      figure("seqno", "Recorded seqno", count, (row) => row.recorded_seqno),
      {
        id: "silent",
        label: "Silent for",
        value: (row) => row.silent_s,
        show: (row) => span(Math.floor(row.silent_s)),
        isNumber: true,
      },
      figure("written", "Last chunk", clock, (row) => row.written_ms),
      figure("behind", "Behind", bytes),
      {
        id: "event",
        label: "Age of its time",
        value: (row) => row.event_age_s,
        show: (row) => (row.event_age_s === null ? "–" : span(Math.floor(row.event_age_s))),
        isNumber: true,
      },
      { id: "finished", label: "Finished", value: (row) => (row.finished ? "yes" : "no") },
    ],
  });
}

// ---- one source -----------------------------------------------------------------------------------------------------

function showSource({ root, route, caller, signal, poll }, topic, source) {
  const key = route.params.get("key");
  const others = caller.data_centres.filter((dc) => dc !== caller.dc);
  const facts = el("dl", { class: "facts" });
  const table = new DataTable({
    caption: "Recorded by data centre",
    route,
    key: (row) => row.dc,
    sort: "dc",
    columns: [
      { id: "dc", label: "Data centre" },
      figure("seqno", "Recorded there", count, (row) => row.recorded),
      figure("here", `Of that here in ${caller.dc}`, count),
      figure("partition", "Partition", count),
      { id: "why", label: "Remark" },
    ],
  });
  const ways = el(
    "p",
    { class: "ways" },
    el("a", { href: to("sources", [topic]) }, "All sources of the topic"),
    el("a", { href: to("tail", [`${caller.dc}.${topic}`], { prefix: source }) }, "Live tail of it"),
  );
  root.append(facts, ways, table.element);

  async function at(dc) {
    const isHere = dc === caller.dc;
    try {
      const answer = await get(
        path`v1/topics/${topic}/sources/${source}`,
        { partition_key: key, dc: isHere ? null : dc },
        signal,
      );
      const here = isHere ? answer.recorded_seqno : answer.mirrored_seqno;
      return {
        dc,
        answer,
        recorded: answer.recorded_seqno,
        here,
        partition: answer.partition,
        why: answer.recorded_seqno === null ? "nothing is recorded" : "",
      };
    } catch (error) {
      if (isHere || !error.status || error.status === 401) {
        throw error;
      }
      return { dc, recorded: null, here: null, partition: null, why: visible(error.message) };
    }
  }

  async function row() {
    const query = { prefix: source };
    const { sources } = await get(path`v1/topics/${topic}/sources`, query, signal);
    return sources.find((one) => one.source_id === source && one.partition_key === key) ?? null;
  }

  poll(async () => {
    const [listed, ...places] = await Promise.all([row(), at(caller.dc), ...others.map(at)]);
    table.update(places);
    const own = places[0].answer;
    put(facts, described(listed, own, key));
  }, EVERY_MS);
}

function described(row, own, key) {
  const known = row === null ? null : figures(row);
  const pairs = [
    ["Partition key", key === null ? "–" : foreign(key)],
    ["Session", count(own.session)],
    ["Worker that owns it", visible(own.url)],
    ["Last chunk or session", known ? `${clock(known.written_ms)}, ${ago(known.written_ms)}` : "–"],
    ["Last heartbeat", known?.heartbeat_ms ? `${clock(known.heartbeat_ms)}, ${ago(known.heartbeat_ms)}` : "–"],
    [
      "Sent of its file",
      known?.size ? `${bytes(known.position)} of ${bytes(known.size)}, behind ${bytes(known.behind)}` : "–",
    ],
    ["All is sent up to", known?.watermark_ms ? `${clock(known.watermark_ms)}, ${ago(known.watermark_ms)}` : "–"],
    ["Finished", known ? (known.finished ? "yes" : "no") : "–"],
  ];
  return pairs.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}
