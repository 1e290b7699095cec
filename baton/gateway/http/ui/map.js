// The cluster: prefill nodes on the left, decode nodes on the right, and a line for each link.
import { $, bytes, count, draw, make, seconds } from "./dom.js";

const CROWD = 6; // nodes of one role above which cards are small
const LABELLED = 12; // links above which only the pointed-at one has a label
let before = null; // bytes of each link at the last answer, for the rate of now
let picked = null; // name of the node that is pointed at

export function showMap(state) {
  const nodes = state.nodes ?? [];
  const links = state.links ?? [];
  const rates = ratesOf(links, nodes, state.now_s);
  const columns = { prefill: $("prefills"), decode: $("decodes") };
  const cards = nodes.map((node) => card(node));
  for (const [role, column] of Object.entries(columns)) {
    const own = cards.filter((_, index) => nodes[index].role === role);
    column.classList.toggle("crowd", own.length > CROWD);
    column.replaceChildren(
      make("h3", {}, `${own.length} ${role}`),
      ...own.length ? own : [make("p", { class: "quiet" }, `No ${role} node is known.`)],
    );
  }
  $("mixed").hidden = !state.mixed;
  $("mixed").textContent = state.mixed ?? "";
  drawLinks(nodes, links, cards, rates);
  nodes.forEach((node, index) => {
    cards[index].addEventListener("pointerenter", () => pick(node.name, explain(node)));
    cards[index].addEventListener("pointerleave", () => pick(null, ""));
  });
  if (picked !== null) pick(picked, $("link-detail").textContent);
}

function card(node) {
  const used = node.blocks ? (node.blocks - node.blocks_free) / node.blocks : 0;
  const leased = node.blocks ? Math.min(node.blocks_leased / node.blocks, used) : 0;
  const rows = node.role === "decode" ? node.rows : node.running;
  return make("article", { class: `node ${node.state}`, "data-name": node.name },
    make("div", { class: "head" },
      make("i", { class: "dot" }),
      make("b", { title: node.address }, node.name),
      make("span", { class: "version" }, node.version),
      node.state === "ready" ? null : make("span", { class: `tag ${node.state === "draining" ? "warn" : "bad"}` }, node.state),
    ),
    meter("KV", used, `${Math.round(used * 100)} %`, leased),
    meter("rows", node.seats ? rows / node.seats : 0, `${count(rows)} / ${count(node.seats)}`),
    make("div", { class: "small" },
      make("span", {}, `${count(node.running)} running`),
      make("span", {}, `${count(node.waiting)} waiting`),
      node.backlog_s > 0.0005 ? make("span", {}, `${seconds(node.backlog_s)} backlog`) : null,
      node.also_decodes ? make("span", {}, "also decodes") : null,
    ),
    node.state !== "ready" && node.detail ? make("div", { class: "small bad" }, node.detail) : null,
  );
}

function meter(name, share, text, part = 0) {
  const width = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0)) * 100;
  return make("div", { class: "meter" },
    make("span", {}, name),
    draw("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": true },
      draw("rect", { class: "track", width: 100, height: 6, rx: 3 }),
      draw("rect", { class: share > 0.9 ? "level high" : "level", width, height: 6, rx: 3 }),
      draw("rect", { class: "leased", width: Math.min(part * 100, width), height: 6, rx: 3 }),
    ),
    make("span", { class: "value" }, text),
  );
}

function drawLinks(nodes, links, cards, rates) {
  const svg = $("links");
  const frame = $("map").getBoundingClientRect();
  const labelled = links.length <= LABELLED;
  svg.setAttribute("viewBox", `0 0 ${Math.max(1, frame.width)} ${Math.max(1, frame.height)}`);
  const labels = [];
  const lines = links.flatMap((link, index) => {
    const from = cards[link.prefill]?.getBoundingClientRect();
    const to = cards[link.decode]?.getBoundingClientRect();
    if (!from || !to) return [];
    const [x1, y1] = [from.right - frame.left, from.top + from.height / 2 - frame.top];
    const [x2, y2] = [to.left - frame.left, to.top + to.height / 2 - frame.top];
    const middle = (x1 + x2) / 2;
    const rate = rates[index];
    const width = 1 + Math.min(3, Math.log10(1 + Math.max(0, link.gigabytes_per_s)));
    const about = explainLink(link, nodes, rate);
    const path = draw("path", {
      class: `link ${link.state}${rate > 0 ? " busy" : ""}`,
      d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`,
      "stroke-width": labelled ? width + 1 : width,
      "data-ends": JSON.stringify([nodes[link.prefill].name, nodes[link.decode].name]),
    }, draw("title", {}, about));
    path.addEventListener("pointerenter", () => { $("link-detail").textContent = about; });
    if (labelled) {
      // Nearer to the decode node by turns, so that labels of crossing links do not meet.
      const t = links.length > 1 ? (link.prefill % 2 ? 0.3 : 0.7) : 0.5;
      const u = 1 - t;
      const x = u * u * u * x1 + 3 * u * t * middle + t * t * t * x2;
      const y = u * u * u * y1 + 3 * u * u * t * y1 + 3 * u * t * t * y2 + t * t * t * y2;
      const text = link.state === "ready" ? `${link.gigabytes_per_s.toFixed(1)} GB/s` : link.state;
      labels.push(draw("text", { class: `gbs ${link.state}`, x, y: y - 5, "text-anchor": "middle" }, text));
    }
    return [path];
  });
  svg.replaceChildren(...lines, ...labels);
}

function ratesOf(links, nodes, nowS) {
  const key = (link) => JSON.stringify([nodes[link.prefill]?.address, link.peer]);
  const passed = before && nowS > before.at ? nowS - before.at : 0;
  const rates = links.map((link) => {
    const known = before?.bytes.get(key(link));
    return passed && known !== undefined ? Math.max(0, link.bytes_total - known) / passed : before?.rates.get(key(link)) ?? 0;
  });
  if (!before || passed) {
    before = {
      at: nowS,
      bytes: new Map(links.map((link) => [key(link), link.bytes_total])),
      rates: new Map(links.map((link, index) => [key(link), rates[index]])),
    };
  }
  return rates;
}

function pick(name, about) {
  picked = name;
  $("links").classList.toggle("picking", name !== null);
  for (const path of $("links").querySelectorAll("path")) {
    path.classList.toggle("picked", name !== null && JSON.parse(path.dataset.ends).includes(name));
  }
  if (about) $("link-detail").textContent = about;
}

function explain(node) {
  return [
    `${node.name} at ${node.address}: ${node.state}${node.detail ? ` (${node.detail})` : ""}`,
    `version ${node.version || "unknown"}`,
    `weights ${node.revision_name ? `${node.revision_name} (${node.revision})` : node.revision || "unknown"}`,
    `KV ${node.layout} x ${node.block_size} in ${node.dtype}, ${count(node.blocks_free)} of ${count(node.blocks)} blocks free, ${count(node.blocks_leased)} leased`,
    `${node.ranks} rank${node.ranks === 1 ? "" : "s"}`,
    `${count(node.tokens_waiting)} prompt tokens wait`,
  ].join("; ");
}

function explainLink(link, nodes, rate) {
  const ends = `${nodes[link.prefill].name} to ${nodes[link.decode].name}: ${link.state}`;
  const speed = link.state === "ready"
    ? ` over ${link.transport || "?"}, measured ${link.gigabytes_per_s.toFixed(2)} GB/s and ${(link.latency_s * 1e6).toFixed(0)} us; ` +
      `now ${bytes(Math.round(rate))}/s, ${bytes(link.bytes_total)} in ${count(link.segments_total)} segments so far`
    : "";
  return `${ends}${speed}${link.detail ? `; ${link.detail}` : ""}`;
}
