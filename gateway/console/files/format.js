// Figures and times as people read them. A figure that is not known is a dash.

import { now } from "./api.js";

export const NONE = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-CA", { year: "numeric", month: "2-digit", day: "2-digit" });

export function count(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(value);
}

export function plural(value, what) {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function rate(value) {
  return value === null || value === undefined ? NONE : `${SHORT.format(value)}/s`;
}

export function bytes(value) {
  if (value === null || value === undefined) {
    return NONE;
  }
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${SHORT.format(value)} ${units[unit]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) {
    return NONE;
  }
  if (seconds < 60) {
    return `${seconds < 10 ? SHORT.format(seconds) : WHOLE.format(seconds)} s`;
  }
  const steps = [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  const at = steps.findIndex(([size]) => seconds >= size);
  const [size, unit] = steps[at];
  const rest = at < 2 ? Math.floor((seconds % size) / steps[at + 1][0]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${steps[at + 1][1]}` : ""}`;
}

export function retention(ms) {
  return ms < 0 ? "unlimited" : span(ms / 1000);
}

export function secondsAgo(ms) {
  return ms === null || ms === undefined ? null : Math.max(0, (now() - ms) / 1000);
}

export function ago(ms) {
  return ms === null || ms === undefined ? NONE : `${span(Math.floor(secondsAgo(ms)))} ago`;
}

// The time alone, and the day with it when that is another one.
export function clock(ms) {
  if (ms === null || ms === undefined) {
    return NONE;
  }
  const day = DAY.format(ms);
  return day === DAY.format(now()) ? CLOCK.format(ms) : `${day} ${CLOCK.format(ms)}`;
}
