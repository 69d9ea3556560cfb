// New chunks of a topic, by stateless reads: a look at the ends of its partitions, then a read of those that moved.
//
// Nothing is stored for it in Kafka. It keeps up by leaving out: a partition that is too far ahead is read from close
// to its end, and what was left out is counted.

import { get, path, request } from "./api.js";

const READ_BYTES = 65_536;
const AT_ONCE = 4;
const A_LOOK = 16;
const BEHIND = 2000;

export class Tail {
  // filters: sourcePrefix, attributes (name → value). partition: one number, or null for all.
  constructor(topic, partition, filters) {
    Object.assign(this, { topic, partition, filters });
    this.positions = new Map();
    this.skipped = 0;
    this.turn = 0;
  }

  // The chunks that are new since the last look, oldest first. before: records before the end, for the first look.
  async look(before, signal) {
    const { offsets } = await get(path`v1/topics/${this.topic}`, {}, signal);
    const led = offsets.filter(
      (one) => one.next !== null && (this.partition === null || one.partition === this.partition),
    );
    for (const { partition, first, next } of led) {
      const known = this.positions.get(partition);
      if (known === undefined || known > next) {
        this.positions.set(partition, Math.max(first, next - before));
      } else if (next - known > BEHIND) {
        this.skipped += next - BEHIND / 10 - known;
        this.positions.set(partition, next - BEHIND / 10);
      }
    }
    const moved = led.filter((one) => this.positions.get(one.partition) < one.next);
    // Each gets its turn where many move.
    const from = moved.length ? this.turn % moved.length : 0;
    const due = [...moved.slice(from), ...moved.slice(0, from)].slice(0, A_LOOK);
    this.turn += due.length;
    const rows = [];
    for (let at = 0; at < due.length; at += AT_ONCE) {
      const some = due.slice(at, at + AT_ONCE);
      rows.push(...(await Promise.all(some.map((one) => this.read(one.partition, signal)))).flat());
    }
    return rows.sort((one, other) => one.recorded_ms - other.recorded_ms);
  }

  async read(partition, signal) {
    const query = {
      offset: this.positions.get(partition),
      max_bytes: READ_BYTES,
      source_prefix: this.filters.sourcePrefix,
    };
    for (const [name, value] of Object.entries(this.filters.attributes)) {
      query[`attr.${name}`] = value;
    }
    const where = path`v1/topics/${this.topic}/partitions/${partition}/chunks`;
    try {
      const response = await request("GET", where, { query, signal, accept: "application/x-ndjson" });
      const text = await response.text();
      this.positions.set(partition, Number(response.headers.get("X-Next-Offset")));
      return text
        .split("\n")
        .filter(Boolean)
        .map((line) => JSON.parse(line));
    } catch (error) {
      if (error.kind !== "out-of-range") {
        throw error;
      }
      this.positions.delete(partition); // retention was faster: from the end again
      return [];
    }
  }
}
