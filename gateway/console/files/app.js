// The frame of the console: who calls, which page is shown, how fresh its figures are.

import { ApiError, get, setToken } from "./api.js";
import { el, labelled, note, put, visible } from "./dom.js";
import { clock } from "./format.js";
import { poll } from "./poll.js";
import { parse, to } from "./route.js";
import * as consumers from "./view-consumers.js";
import * as hbase from "./view-hbase.js";
import * as lanes from "./view-lanes.js";
import * as mirror from "./view-mirror.js";
import * as overview from "./view-overview.js";
import * as sources from "./view-sources.js";
import * as subscriptions from "./view-subscriptions.js";
import * as tables from "./view-tables.js";
import * as tail from "./view-tail.js";
import * as topics from "./view-topics.js";

const PAGES = { overview, topics, sources, lanes, consumers, mirror, subscriptions, tables, hbase, tail };

const [place, who, forget, nav, main, trouble, view, updated] = [
  "place",
  "caller",
  "forget",
  "nav",
  "main",
  "trouble",
  "view",
  "updated",
].map((id) => document.getElementById(id));

let caller = null;
let leave = new AbortController();
let isShown = false;
// The looks of this page that fail now, each with its error and since when.
let failures = new Map();

async function start() {
  try {
    caller = await get("v1/caller");
  } catch (error) {
    return error.status === 401 ? ask("") : unreachable(error);
  }
  put(place, `${caller.dc} · ${caller.version}`);
  put(who, caller.name === null ? "no tokens are configured" : visible(caller.name));
  forget.hidden = caller.name === null;
  nav.hidden = false;
  nav.replaceChildren(
    el(
      "ul",
      {},
      Object.entries(PAGES).map(([name, page]) =>
        el("li", {}, el("a", { href: to(name), "data-page": name }, page.title)),
      ),
    ),
  );
  show();
}

function unreachable(error) {
  report(start, { error });
  setTimeout(start, 2000);
}

// ---- the token ------------------------------------------------------------------------------------------------------

function ask(why) {
  leave.abort();
  caller = null;
  failures = new Map();
  nav.hidden = forget.hidden = trouble.hidden = true;
  put(who, "");
  document.title = "Token – logferry";
  const input = el("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const problem = el("p", { role: "alert" }, why);
  const open = async (event) => {
    event.preventDefault();
    setToken(input.value.trim());
    try {
      await get("v1/caller");
      start();
    } catch (error) {
      put(problem, error.status === 401 ? "This token is not configured here." : error.message);
    }
  };
  view.replaceChildren(
    el("h1", {}, "Token"),
    note("This gateway asks for a token. It is kept in the memory of this page: a reload forgets it."),
    el("form", { onsubmit: open }, labelled("Token", input), el("button", {}, "Open")),
    problem,
  );
  put(updated, "");
  input.focus();
}

forget.addEventListener("click", () => {
  setToken(null);
  ask("The token is forgotten.");
});

// ---- pages ----------------------------------------------------------------------------------------------------------

function show() {
  if (caller === null) {
    return;
  }
  leave.abort();
  leave = new AbortController();
  failures = new Map();
  trouble.hidden = true;
  put(updated, "");
  const route = parse(location.hash);
  const page = PAGES[route.page] ?? overview;
  for (const item of nav.querySelectorAll("a")) {
    if (item.dataset.page === route.page) {
      item.setAttribute("aria-current", "page");
      item.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else {
      item.removeAttribute("aria-current");
    }
  }
  const heading = el("h1", { tabindex: "-1" }, [page.title, ...route.names].map(visible).join(" / "));
  document.title = `${heading.textContent} – logferry`;
  const root = el("div");
  view.replaceChildren(heading, root);
  const { signal } = leave;
  page.show({
    root,
    route,
    caller,
    signal,
    poll: (work, everyMs) => poll(work, everyMs, signal, (said) => report(work, said)),
    refused: (what) => root.append(note(`The token does not have the right to see this: ${what}`)),
  });
  if (isShown) {
    heading.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
  isShown = true;
}

addEventListener("hashchange", show);

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address holds the state of the page
  main.focus();
});

// ---- freshness ------------------------------------------------------------------------------------------------------

function report(work, { at, error }) {
  if (error instanceof ApiError && error.status === 401) {
    setToken(null);
    ask("The token is not configured any more.");
    return;
  }
  if (error) {
    failures.set(work, { since: failures.get(work)?.since ?? Date.now(), error });
  } else {
    failures.delete(work);
    put(updated, `Updated ${clock(at)}. A hidden tab asks nothing.`);
  }
  const [failure] = failures.values();
  trouble.hidden = !failure;
  if (failure) {
    const what = failure.error instanceof ApiError ? failure.error.message : `the page failed: ${failure.error}`;
    const hint = "The figures below may be older; the page tries again.";
    put(trouble, `Since ${clock(failure.since)}: ${visible(what)}. ${hint}`);
  }
}

start();
