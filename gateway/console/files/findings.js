// What is wrong with the mirror and with push delivery, from the status documents of their workers: as the gateway's own
// findings, with since_ms (null: not known) for for_s, and the page that shows more.

import { el, foreign } from "./dom.js";
import { clock, plural, secondsAgo } from "./format.js";
import { to } from "./route.js";

// A failure of a receiver that lasts has been tried so often.
const LASTING_ATTEMPTS = 2;

// Workers that answer, and the reasons of those that do not.
export function answering(workers) {
  const entries = Object.entries(workers);
  return {
    known: entries.filter(([, worker]) => worker.lanes).map(([, worker]) => worker),
    silent: entries
      .filter(([, worker]) => !worker.lanes)
      .map(([url, worker]) => ({ url, why: worker.error ?? "?" })),
  };
}

export function mirrorFindings(workers) {
  const { known, silent } = answering(workers);
  const stopped = known.flatMap((worker) => worker.partitions.filter((partition) => partition.stop));
  const stops = grouped(stopped, (one) => one.stop.kind).map((some) => {
    const what = `the mirror has stopped ${plural(some.length, "partition")}: ${some[0].stop.kind}`;
    return { wrong: true, what, ...stopOf(some, (stop) => stop.since_ms), page: to("mirror") };
  });
  const waits = known
    .flatMap((worker) => worker.links)
    .filter((one) => one.last_wait && one.last_wait.ended_ms === null);
  const waiting = waits.map((one) => {
    const { reason, since_ms, is_fault } = one.last_wait;
    return { wrong: is_fault, what: `the mirror's link to ${one.dc} waits`, reason, since_ms };
  });
  const lasting = waiting.filter((one) => one.wrong || secondsAgo(one.since_ms) >= 5);
  return [...away(silent, "the mirror"), ...stops, ...lasting];
}

export function deliveryFindings(workers) {
  const { known, silent } = answering(workers);
  const units = known.flatMap((worker) => worker.units);
  const stopped = units.filter((unit) => unit.stop);
  const stops = grouped(stopped, (one) => `${one.subscription} ${one.stop.kind}`).map((some) => {
    const { subscription, stop } = some[0];
    const what = `the subscription ${subscription} has stopped ${plural(some.length, "partition")}: ${stop.kind}`;
    return { wrong: true, what, ...stopOf(some, (one) => one.at_ms), page: to("subscriptions", [subscription]) };
  });
  const failing = units.filter((unit) => unit.error && !unit.stop && unit.error.attempts >= LASTING_ATTEMPTS);
  const failures = grouped(failing, (one) => one.subscription).map((some) => {
    const { subscription, error } = some[0];
    const what = `the receiver of ${subscription} does not take ${plural(some.length, "partition")}`;
    const reason = `${placesOf(some)}: ${error.detail}; it is retried until the receiver takes it`;
    return { wrong: true, what, reason, since_ms: null, page: to("subscriptions", [subscription]) };
  });
  return [...away(silent, "push delivery"), ...stops, ...failures];
}

// One finding as an item of a list.
export function shown({ wrong, what, reason, since_ms, page }) {
  return el(
    "li",
    { class: wrong ? "wrong" : "passing" },
    el("strong", {}, wrong ? "Problem: " : "Note: ", foreign(what)),
    since_ms === null ? null : el("span", { class: "since" }, ` ${wrong ? "since" : "at"} ${clock(since_ms)}`),
    el("div", {}, foreign(reason)),
    page ? el("div", {}, el("a", { href: page }, "Its page")) : null,
  );
}

export function away(silent, whose) {
  return silent.map(({ url, why }) => ({
    wrong: true,
    what: `the worker ${url} of ${whose} does not answer`,
    reason: why,
    since_ms: null,
  }));
}

// Of partitions that stopped for the same reason: which, the way on, and since when.
function stopOf(some, sinceOf) {
  const [{ stop }] = some;
  const since_ms = Math.min(...some.map((one) => sinceOf(one.stop)));
  return { reason: `${placesOf(some)}: ${stop.detail}; ${stop.what_to_do}`, since_ms };
}

function placesOf(some) {
  const names = some.slice(0, 5).map((one) => `${one.topic}-${one.partition}`);
  return names.join(", ") + (some.length > names.length ? ", …" : "");
}

function grouped(all, keyOf) {
  const found = new Map();
  for (const one of all) {
    found.set(keyOf(one), [...(found.get(keyOf(one)) ?? []), one]);
  }
  return [...found.values()];
}
