// Bars of a series, small enough for a cell of a table, with its figures as a text for screen readers.

import { svg } from "./dom.js";
import { clock, count } from "./format.js";

const [WIDTH, HEIGHT, GAP] = [8, 28, 2];

export function bars(hour, label) {
  const most = Math.max(1, ...hour.map(({ records }) => records ?? 0));
  const shapes = hour.map(({ from, records }, place) => {
    const height = records === null ? 1 : Math.max(records ? 2 : 1, Math.round((records / most) * HEIGHT));
    const title = `from ${clock(from)}: ${records === null ? "not known" : `${count(records)} records`}`;
    const kind = records === null ? "unknown" : records ? "bar" : "none";
    const shape = { class: kind, x: place * (WIDTH + GAP), y: HEIGHT - height, width: WIDTH, height };
    return svg("rect", shape, svg("title", {}, title));
  });
  const width = hour.length * (WIDTH + GAP);
  const known = hour.filter(({ records }) => records !== null).map(({ records }) => count(records));
  const text = `${label}: ${known.length ? known.join(", ") : "not known yet"}`;
  return svg(
    "svg",
    { class: "bars", viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": text },
    shapes,
  );
}
