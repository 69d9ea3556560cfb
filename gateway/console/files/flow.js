// The flow of topics in records, of what Kafka itself knows: offsets now, and offsets at marks of the last hour.
//
// * Kafka numbers the records of each partition, so the difference of two offsets counts the records between them. It
//   counts the control records of transactions, too: one or two a transaction.
// * A mark is loaded once and kept while this page lives. What retention has removed since then is not counted.

import { get, now } from "./api.js";

export const STEP_MS = 300_000;
const MARKS = 12;
const WINDOW_MS = 30_000;

// Topic → its samples of the last half minute: {atMs, id, ends: partition → offset}.
const samples = new Map();
// Time of a mark → topic → {id, at: partition → offset}.
const marks = new Map();

// The topics that the token may see, each with its rate.
export async function lookAtTopics(query, signal) {
  return record((await get("v1/topics", query, signal)).topics);
}

export function record(topics) {
  const atMs = performance.now();
  for (const topic of topics) {
    const known = (samples.get(topic.topic) ?? []).filter((one) => one.id === topic.id);
    known.push({ atMs, id: topic.id, ends: ends(topic) });
    while (known.length > 2 && atMs - known[0].atMs > WINDOW_MS) {
      known.shift();
    }
    samples.set(topic.topic, known);
  }
  return topics.map((topic) => ({ ...topic, rate: rateOf(topic.topic) }));
}

function ends(topic) {
  return new Map(topic.offsets.filter(({ next }) => next !== null).map(({ partition, next }) => [partition, next]));
}

// Records a second over the last samples, of a topic or of one partition; null until there are two.
export function rateOf(topic, partition = null) {
  const known = samples.get(topic) ?? [];
  if (known.length < 2) {
    return null;
  }
  const [first, last] = [known[0], known[known.length - 1]];
  const records = between(first.ends, last.ends, partition);
  return records === null ? null : records / ((last.atMs - first.atMs) / 1000);
}

function between(before, after, partition = null) {
  const numbers = partition === null ? [...after.keys()] : [partition];
  const known = numbers.filter((number) => before.has(number) && after.has(number));
  if (!known.length) {
    return null;
  }
  return known.reduce((sum, number) => sum + Math.max(0, after.get(number) - before.get(number)), 0);
}

// The marks of the last hour that are due, the latest last.
function due() {
  const last = Math.floor(now() / STEP_MS) * STEP_MS;
  return Array.from({ length: MARKS + 1 }, (_, step) => last - (MARKS - step) * STEP_MS);
}

export function isWhole() {
  return due().every((mark) => marks.has(mark));
}

// Loads one mark that is missing, the latest first; a page thus fills its hour in a dozen looks.
export async function loadMark(signal) {
  const wanted = due();
  for (const known of marks.keys()) {
    if (!wanted.includes(known)) {
      marks.delete(known);
    }
  }
  const missing = wanted.reverse().find((mark) => !marks.has(mark));
  if (missing === undefined) {
    return;
  }
  const { topics } = await get("v1/topics", { at_ms: missing }, signal);
  const found = new Map();
  for (const topic of topics) {
    const led = topic.offsets.filter(({ next }) => next !== null);
    // Nothing recorded so late: the records end before the mark.
    const at = new Map(led.map((one) => [one.partition, one.at ?? one.next]));
    found.set(topic.topic, { id: topic.id, at });
  }
  marks.set(missing, found);
}

// Records of a topic in each step of the last hour, and in the one that runs; null: not known (yet).
export function hourOf(topic) {
  const known = samples.get(topic) ?? [];
  const last = known[known.length - 1];
  const at = due().map((mark) => {
    const found = marks.get(mark)?.get(topic);
    return found && found.id === last?.id ? found.at : null;
  });
  const bounds = [...at, last?.ends ?? null];
  return due().map((from, step) => {
    const [before, after] = [bounds[step], bounds[step + 1]];
    return { from, records: before && after ? between(before, after) : null };
  });
}

export function sumOf(hour) {
  const known = hour.filter(({ records }) => records !== null);
  return known.length ? known.reduce((sum, { records }) => sum + records, 0) : null;
}
