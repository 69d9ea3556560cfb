// Elements are made of tags, attributes and texts. Text from the gateway becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";
// Characters that hide, or that reverse what stands around them.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A foreign text: isolated from the direction of its surroundings, invisible characters spelled out.
export function foreign(text) {
  return el("bdi", {}, visible(text));
}

export function visible(text) {
  return String(text).replace(INVISIBLE, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
}

export function link(route, text) {
  return el("a", { href: route }, foreign(text));
}

// Replaces the content (a text, an element, or a list of elements) only where it differs, so that focus and selection
// stay.
export function put(element, content) {
  if (typeof content === "string") {
    if (element.childElementCount > 0 || element.textContent !== content) {
      element.textContent = content;
    }
    return;
  }
  const nodes = [content].flat();
  const old = element.childNodes;
  if (old.length !== nodes.length || nodes.some((node, at) => !old[at].isEqualNode(node))) {
    element.replaceChildren(...nodes);
  }
}

let controls = 0;

export function labelled(label, control) {
  controls += 1;
  control.id = `control-${controls}`;
  return el("div", { class: "field" }, el("label", { for: control.id }, label), control);
}

export function select(options, chosen, onchange) {
  const made = options.map(([value, text]) => el("option", { value, selected: value === chosen }, text));
  return el("select", { onchange }, made);
}

export function note(...children) {
  return el("p", { class: "note" }, ...children);
}
