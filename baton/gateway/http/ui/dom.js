// Makes elements and keeps the page in step with them. Texts only become text nodes, so no name or message can be markup.
const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Gives `target` these children. Elements that are there already are changed in place, so that a poll loses no focus,
// no scroll position and no running animation. Elements of a list are recognised by their data-key.
export function show(target, ...children) {
  const focused = document.activeElement;
  patchChildren(target, [...make("div", {}, ...children).childNodes]);
  // A browser drops the focus of an element that moves.
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
  // An element that is gone leaves its focus to the list, if the list takes it.
  if (focused && !focused.isConnected) target.focus({ preventScroll: true });
}

function patchChildren(target, wanted) {
  const keys = new Set(wanted.map(keyOf));
  const known = new Map();
  for (const child of [...target.childNodes]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (keys.has(key)) known.set(key, child);
    else child.remove();
  }
  let place = target.firstChild;
  for (const next of wanted) {
    const key = keyOf(next);
    let old = key === undefined ? place : known.get(key);
    known.delete(key); // two elements with one key are two elements
    if (old && (keyOf(old) !== key || old.nodeName !== next.nodeName)) old = null;
    if (!old) {
      target.insertBefore(next, place);
      continue;
    }
    if (old === place) place = place.nextSibling;
    else target.insertBefore(old, place);
    patch(old, next);
  }
  while (place) {
    const rest = place.nextSibling;
    place.remove();
    place = rest;
  }
}

function patch(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patchChildren(old, [...next.childNodes]);
}

function keyOf(node) {
  return node.dataset?.key;
}

export function facts(...pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return make("dl", {}, known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

// A table in which every column has a heading. Columns marked `wide` are left out on narrow screens.
export function table(label, columns, rows) {
  const head = columns.map(({ name, kind = "" }) => make("th", { scope: "col", class: kind }, name));
  return make("table", { "aria-label": label }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  return `${(value * 1e3).toFixed(2)} ms`;
}

export function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(value) || 0} B`;
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : String(value);
}

export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(share * 100)} %` : "–";
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function ago(passed) {
  const value = Math.max(0, passed);
  if (value < 60) return `${value.toFixed(0)} s ago`;
  return value < 3600 ? `${Math.floor(value / 60)} min ago` : `${Math.floor(value / 3600)} h ago`;
}
