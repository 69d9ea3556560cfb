// The documented HTTP interface of the gateway that serves this page. The token lives in this module's memory alone:
// a reload forgets it.

const TIMEOUT_MS = 20_000;
const ROOT = new URL("../", document.baseURI);

let token = null;
// How far the brokers' clock is ahead of this browser's; every answer of the gateway is dated by it.
let aheadMs = 0;

export class ApiError extends Error {
  // status 0: no answer. kind: the last segment of the problem's type.
  constructor(status, kind, detail) {
    super(detail);
    this.status = status;
    this.kind = kind;
  }
}

export function setToken(text) {
  token = text;
}

export function now() {
  return Date.now() + aheadMs;
}

// Names of topics, sources and consumers in a path.
export function path(strings, ...names) {
  return String.raw({ raw: strings }, ...names.map(encodeURIComponent));
}

export async function request(method, where, { body, accept, query, signal } = {}) {
  const url = new URL(where, ROOT);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== null && value !== undefined && value !== "") {
      url.searchParams.set(name, value);
    }
  }
  const headers = {};
  if (token !== null) {
    headers.Authorization = `Bearer ${token}`;
  }
  if (accept) {
    headers.Accept = accept;
  }
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
  }
  const limits = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  let response;
  try {
    response = await fetch(url, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.any(limits),
      credentials: "omit",
      redirect: "error",
      cache: "no-store",
    });
  } catch (error) {
    throw signal?.aborted ? error : new ApiError(0, "unreachable", "this gateway worker does not answer");
  }
  const date = Date.parse(response.headers.get("Date") ?? "");
  if (!Number.isNaN(date) && Math.abs(date - now()) > 1500) {
    aheadMs = date - Date.now();
  }
  if (!response.ok) {
    throw await problem(response);
  }
  return response;
}

async function problem(response) {
  const document = await response.json().catch(() => ({}));
  const kind =
    String(document.type ?? "")
      .split("/")
      .pop() || `status-${response.status}`;
  return new ApiError(response.status, kind, document.detail ?? response.statusText);
}

export async function get(where, query, signal) {
  return (await request("GET", where, { query, signal })).json();
}

export async function send(method, where, { body, query } = {}) {
  return (await request(method, where, { body, query })).json();
}
