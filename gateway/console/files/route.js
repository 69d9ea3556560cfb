// The state of the page in its address: #/page/name/name?filter=…&sort=…, so that a link leads to each state.

export function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?", 2);
  const [page, ...names] = path.split("/").map(decoded);
  return { page: page || "overview", names, params: new URLSearchParams(query ?? "") };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function to(page, names = [], params = {}) {
  const path = [page, ...names].map(encodeURIComponent).join("/");
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
}

// Changes parameters of the present state in place: the view stays, the address can be copied.
export function remember(route, changes) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") {
      route.params.delete(name);
    } else {
      route.params.set(name, value);
    }
  }
  history.replaceState(null, "", to(route.page, route.names, Object.fromEntries(route.params)));
}
