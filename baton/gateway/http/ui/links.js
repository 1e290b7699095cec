// The links from prefill nodes to decode nodes: lines between the cards, a list, and the bytes that move now.
import { $, ago, bytes, count, draw, make, plural, show, table } from "./dom.js";

const ROWS_ABOVE = 6; // nodes of one role above which the cluster is shown as tables
const LISTED = 6; // links in the list; the rest is in the nodes' details
const LABELLED = 9; // links above which only busy and broken ones have a label
let before = null; // bytes of each link at the last answer, for the rate of now
let rates = new Map(); // bytes per second, by link

export const nodeKey = (node) => `${node.role} ${node.address}`;

export function isLarge(nodes) {
  return ["prefill", "decode"].some((role) => nodes.filter((node) => node.role === role).length > ROWS_ABOVE);
}

const linkKey = (link, nodes) => `${nodeKey(nodes[link.prefill])} ${nodes[link.decode]?.address ?? link.peer}`;
const peerName = (link, nodes) => nodes[link.decode]?.name ?? link.peer;

export function takeRates(state) {
  const nodes = state.nodes ?? [];
  const links = state.links ?? [];
  const passed = before ? state.now_s - before.at : 0;
  if (before && passed <= 0) return;
  rates = new Map(links.map((link) => {
    const known = before?.bytes.get(linkKey(link, nodes));
    return [linkKey(link, nodes), known === undefined ? 0 : Math.max(0, link.bytes_total - known) / passed];
  }));
  before = { at: state.now_s, bytes: new Map(links.map((link) => [linkKey(link, nodes), link.bytes_total])) };
}

export function showLinks(state) {
  const nodes = state.nodes ?? [];
  const links = state.links ?? [];
  const rate = (link) => rates.get(linkKey(link, nodes)) ?? 0;
  show($("hand-over"), lastHandOver(state));
  const sorted = [...links].sort((a, b) => (a.state === "ready") - (b.state === "ready") || rate(b) - rate(a));
  const listed = (isLarge(nodes) ? sorted.filter((link) => link.state !== "ready" || rate(link) > 0) : sorted).slice(0, LISTED);
  const rest = sorted.length - listed.length;
  $("link-list").hidden = links.length === 0;
  $("link-list").classList.toggle("drawn", !isLarge(nodes));
  show($("link-list"),
    make("h3", {}, summary(links, rate)),
    listed.length ? linkTable("Links", "Link", listed, (link) => `${nodes[link.prefill].name} → ${peerName(link, nodes)}`, nodes) : null,
    rest > 0 ? make("p", { class: "quiet" }, `${plural(rest, "more link")} in the details of the nodes.`) : null);
  drawLines(nodes, links, rate);
}

function summary(links, rate) {
  const broken = links.filter((link) => link.state !== "ready").length;
  const sent = links.reduce((sum, link) => sum + link.bytes_total, 0);
  const now = links.reduce((sum, link) => sum + rate(link), 0);
  return `${plural(links.length, "link")}${broken ? `, ${broken} not ready` : ""}; ${bytes(sent)} of KV sent, ${bytes(now)}/s now`;
}

// What moved for the newest request that was handed over.
function lastHandOver(state) {
  const request = (state.requests ?? []).find((each) => each.receipt?.bytes_sent > 0);
  if (!request) return "No KV has moved between nodes yet. Send a prompt to see a hand-over.";
  const { prefill_node: from, decode_node: to, bytes_sent: sent, segments, transport } = request.receipt;
  return `Last hand-over, ${ago(state.now_s - request.ended_at_s)}: ${bytes(sent)} of KV moved from ${from} to ${to} in ${plural(segments, "segment")} over ${transport}.`;
}

export function linksOf(node, state) {
  const nodes = state.nodes ?? [];
  const index = nodes.indexOf(node);
  const own = (state.links ?? []).filter((link) => link.prefill === index || link.decode === index);
  if (own.length === 0) return null;
  own.sort((a, b) => peerName(a, nodes).localeCompare(peerName(b, nodes), "en", { numeric: true }) || a.prefill - b.prefill);
  const other = (link) => link.prefill === index ? `→ ${peerName(link, nodes)}` : `← ${nodes[link.prefill].name}`;
  const links = linkTable(`Links of ${node.name}`, "Links", own, other, nodes);
  if (own.length <= LISTED) return links;
  return make("div", { class: "scroll", role: "region", "aria-label": `List of the links of ${node.name}`, tabindex: 0 }, links);
}

function linkTable(label, first, links, nameOf, nodes) {
  const columns = [{ name: first }, { name: "Measured", kind: "n" }, { name: "Sent", kind: "n" }, { name: "Now", kind: "n" }];
  return table(label, columns, links.flatMap((link) => {
    const rate = rates.get(linkKey(link, nodes)) ?? 0;
    const ready = link.state === "ready";
    const line = make("tr", { "data-key": linkKey(link, nodes) },
      make("th", { scope: "row" }, nameOf(link)),
      make("td", { class: ready ? "n" : "n bad" }, ready ? `${link.gigabytes_per_s.toFixed(2)} GB/s ${link.transport}` : link.state),
      make("td", { class: "n" }, bytes(link.bytes_total)),
      make("td", { class: rate > 0 ? "n moving" : "n" }, `${bytes(rate)}/s`));
    if (!link.detail) return [line];
    return [line, make("tr", { "data-key": `${linkKey(link, nodes)} why` }, make("td", { colspan: 4, class: "bad" }, link.detail))];
  }));
}

function drawLines(nodes, links, rate) {
  const svg = $("lines");
  const frame = $("map").getBoundingClientRect();
  // The columns stand side by side only on a wide screen; below each other they leave no room for lines.
  const apart = $("decodes").getBoundingClientRect().left - $("prefills").getBoundingClientRect().right;
  if (isLarge(nodes) || apart < 60) {
    show(svg);
    return;
  }
  const card = new Map([...document.querySelectorAll("#map li.node")].map((element) => [element.dataset.node, element]));
  // A line starts at the name, which stays where it is when a card opens.
  const middle = (element) => {
    const box = element.getBoundingClientRect();
    return { left: box.left - frame.left, right: box.right - frame.left, y: box.top - frame.top + Math.min(box.height / 2, 44) };
  };
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, frame.width)} ${Math.max(1, frame.height)}`);
  const drawn = links.flatMap((link) => {
    const [from, to] = [card.get(nodeKey(nodes[link.prefill])), nodes[link.decode] && card.get(nodeKey(nodes[link.decode]))];
    return from && to ? [{ link, a: middle(from), b: middle(to) }] : [];
  });
  const lines = drawn.map(({ link, a, b }) => {
    const x = (a.right + b.left) / 2;
    return draw("path", {
      "data-key": linkKey(link, nodes),
      class: `link ${link.state}${rate(link) > 0 ? " busy" : ""}`,
      d: `M${a.right} ${a.y}C${x} ${a.y} ${x} ${b.y} ${b.left} ${b.y}`,
    });
  });
  const labels = drawn.flatMap(({ link, a, b }, index) => {
    const busy = rate(link) > 0;
    if (drawn.length > LABELLED && link.state === "ready" && !busy) return [];
    const text = link.state !== "ready" ? link.state : busy ? `${bytes(rate(link))}/s` : link.bytes_total ? `${bytes(link.bytes_total)} sent` : "idle";
    // Nearer to one end by turns, so that labels of crossing links do not meet.
    const t = drawn.length === 1 ? 0.5 : link.prefill % 2 ? 0.32 : 0.68;
    const u = 1 - t;
    const middleX = (a.right + b.left) / 2;
    const at = {
      x: u * u * u * a.right + 3 * u * t * middleX + t * t * t * b.left,
      y: (u * u * u + 3 * u * u * t) * a.y + (3 * u * t * t + t * t * t) * b.y - 6,
    };
    const kind = link.state !== "ready" ? "bad" : busy ? "moving" : "";
    return [draw("text", { "data-key": `${index} label`, class: `label ${kind}`, ...at, "text-anchor": "middle" }, text)];
  });
  show(svg, lines, labels);
}
