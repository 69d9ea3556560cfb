// What is wrong with the mirror, from the status documents of its workers, in the form of the gateway's own findings.

import { plural, secondsAgo } from "./format.js";

// Workers that answer, and the reasons of those that do not.
export function answering(workers) {
  const entries = Object.entries(workers);
  return {
    known: entries.filter(([, worker]) => worker.links).map(([, worker]) => worker),
    silent: entries
      .filter(([, worker]) => !worker.links)
      .map(([url, worker]) => ({ url, why: worker.error ?? "?" })),
  };
}

export function mirrorFindings(workers) {
  const { known, silent } = answering(workers);
  const away = silent.map(({ url, why }) => finding(true, `the mirror's worker ${url} does not answer`, why, null));
  const stopped = known.flatMap((worker) => worker.partitions.filter((partition) => partition.stop));
  const stops = byReason(stopped).map(([kind, some]) => {
    const since = Math.min(...some.map((partition) => partition.stop.since_ms));
    const names = some.slice(0, 5).map((partition) => `${partition.topic}-${partition.partition}`);
    const what = `the mirror has stopped ${plural(some.length, "partition")}: ${kind}`;
    return finding(true, what, `${names.join(", ")}: ${some[0].stop.what_to_do}`, secondsAgo(since));
  });
  const waits = known
    .flatMap((worker) => worker.links)
    .filter((one) => one.last_wait && one.last_wait.ended_ms === null);
  const waiting = waits.map((one) => {
    const { reason, since_ms, is_fault } = one.last_wait;
    return finding(is_fault, `the mirror's link to ${one.dc} waits`, reason, secondsAgo(since_ms));
  });
  return [...away, ...stops, ...waiting.filter((one) => one.wrong || one.for_s >= 5)];
}

function finding(wrong, what, reason, for_s) {
  return { wrong, what, reason, for_s };
}

function byReason(partitions) {
  const found = new Map();
  for (const partition of partitions) {
    found.set(partition.stop.kind, [...(found.get(partition.stop.kind) ?? []), partition]);
  }
  return [...found];
}
