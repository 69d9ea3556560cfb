// What the gateway cannot know of tables, and where it is shown instead.

import { el, note } from "./dom.js";

export const title = "Tables";

const COMMANDS = [
  ["logferry table state PATH", "batches, positions and problems of a table"],
  ["logferry table segments PATH", "each hour: complete or not, and which sources it waits for"],
  ["logferry audit --table PATH", "whether the table holds what Kafka holds"],
];

export function show({ root }) {
  root.append(
    note(
      "Tables and their segments are not on this page. The loader keeps their state beside the table, in a folder or a " +
        "store that the gateway has no access to, and it has no interface that the gateway could ask. The loader's " +
        "metrics have the lag of each table.",
    ),
    note("On a host that reaches the table:"),
    el(
      "dl",
      { class: "facts" },
      COMMANDS.map(([command, what]) => el("div", {}, el("dt", {}, el("code", {}, command)), el("dd", {}, what))),
    ),
  );
}
