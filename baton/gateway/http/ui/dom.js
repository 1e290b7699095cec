// Makes elements. Texts only ever become text nodes, so no name or message can be markup.
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
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function seconds(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  return `${(value * 1e3).toFixed(2)} ms`;
}

export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 10 * size ? 0 : 1)} ${unit}`;
  }
  return `${value || 0} B`;
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 1e6 ? `${(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${(value / 1e3).toFixed(1)}k` : String(value);
}
