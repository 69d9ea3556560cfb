// What is wrong now, and the flow of the last hour by data centre and topic.

import { get } from "./api.js";
import { bars } from "./chart.js";
import { el, note, put, visible } from "./dom.js";
import { deliveryFindings, mirrorFindings, shown } from "./findings.js";
import { hourOf, isWhole, loadMark, lookAtTopics, sumOf } from "./flow.js";
import { clock, count, rate } from "./format.js";
import { DataTable, figure, topicColumns } from "./table.js";

export const title = "Overview";

const EVERY_MS = 5000;
const MARK_MS = 1500;

export function show({ root, route, caller, signal, poll }) {
  const wrong = el("section", { "aria-labelledby": "wrong" });
  const verdict = el("h2", { id: "wrong", "aria-live": "polite" }, "What is wrong now");
  const list = el("ul", { class: "findings" });
  wrong.append(verdict, list);
  const cards = el("dl", { class: "cards" });
  const source = note();
  const table = flowTable(route);
  root.append(wrong, el("h2", {}, "Flow"), cards, source, table.element);

  if (caller.everything) {
    const others = { mirror: mirrorFindings, deliver: deliveryFindings };
    const found = {};
    poll(async () => {
      const service = await get("v1/workers", {}, signal);
      const own = service.findings.map((finding) => ({
        ...finding,
        since_ms: finding.for_s === null ? null : service.at_ms - finding.for_s * 1000,
      }));
      showFindings(verdict, list, [own, ...Object.values(found)].flat());
    }, EVERY_MS);
    for (const [name, findingsOf] of Object.entries(others)) {
      poll(async () => {
        found[name] = findingsOf((await get(`v1/${name}`, {}, signal)).workers);
      }, EVERY_MS);
    }
  } else {
    wrong.append(note('The state of the workers takes a token with admin = ["*"].'));
  }
  poll(async () => {
    showFlow(await lookAtTopics({}, signal), table, cards, source);
  }, EVERY_MS);
  poll(() => (isWhole() ? null : loadMark(signal)), MARK_MS);
}

function showFindings(verdict, list, findings) {
  const wrong = findings.filter((finding) => finding.wrong).length;
  put(verdict, wrong ? `What is wrong now: ${count(wrong)}` : "Nothing is wrong now");
  verdict.className = wrong ? "bad" : "good";
  put(list, findings.map(shown));
}

function flowTable(route) {
  return new DataTable({
    caption: "Flow by topic",
    route,
    key: (row) => row.topic,
    sort: "-rate",
    empty: "There is no topic that this token may see.",
    columns: [
      ...topicColumns(),
      figure("hour", "In the hour", count, (row) => row.sum),
      {
        id: "bars",
        label: "Last hour",
        value: (row) => row.sum,
        show: (row) => bars(row.hour, "records in steps of 5 minutes"),
      },
    ],
  });
}

function showFlow(topics, table, cards, source) {
  const rows = topics.map((topic) => {
    const hour = hourOf(topic.topic);
    return { ...topic, hour, sum: sumOf(hour) };
  });
  table.update(rows);
  const from = hourOf("")[0].from;
  put(
    source,
    `Records now: since this page was opened, at most the last half minute. In the hour: since ${clock(from)}, by the ` +
      "offsets and times that Kafka keeps" +
      (isWhole() ? "" : " (still loading)") +
      "; it counts records and the control records of transactions, not bytes. A topic of another data centre is its " +
      "copy here, at the times of its original.",
  );
  const dcs = [...new Set(rows.map((row) => row.dc))].sort();
  const total = (dc, name) => {
    const known = rows.filter((row) => row.dc === dc && row[name] !== null);
    return known.length ? known.reduce((sum, row) => sum + row[name], 0) : null;
  };
  const hour = (dc) => `${count(total(dc, "sum"))} records in the hour`;
  const card = (dc) =>
    el(
      "div",
      {},
      el("dt", {}, visible(dc)),
      el("dd", {}, rate(total(dc, "rate"))),
      el("dd", { class: "small" }, hour(dc)),
    );
  put(cards, dcs.map(card));
}
