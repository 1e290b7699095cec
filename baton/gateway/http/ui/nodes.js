// The nodes: a card for each in a small cluster, a row of a table in a large one. A click, a touch or Enter opens one.
import { $, bytes, count, draw, facts, make, percent, plural, seconds, show, table } from "./dom.js";
import { isLarge, linksOf, nodeKey } from "./links.js";

const SPARKLINE_POINTS = 30; // width of a line that has fewer points
const open = new Set(); // keys of the nodes whose details are shown

export function setUpNodes(redraw) {
  $("map").addEventListener("click", (event) => {
    const node = event.target.closest("[data-node]");
    if (!node || event.target.closest(".detail")) return;
    if (!open.delete(node.dataset.node)) open.add(node.dataset.node);
    redraw();
  });
}

export function showNodes(state) {
  const nodes = [...state.nodes ?? []].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const large = isLarge(nodes);
  $("map").classList.toggle("large", large);
  for (const [role, column] of [["prefill", $("prefills")], ["decode", $("decodes")]]) {
    const own = nodes.filter((node) => node.role === role);
    show(column,
      make("h3", {}, heading(own, role)),
      own.length === 0 ? make("p", { class: "quiet" }, `No ${role} node is known.`)
        : large ? rows(own, role, state) : make("ul", { class: "cards" }, own.map((node) => card(node, state))));
  }
}

function heading(nodes, role) {
  const states = new Map();
  for (const { state } of nodes) states.set(state, (states.get(state) ?? 0) + 1);
  const parts = [...states].map(([state, number]) => `${number} ${state}`);
  return `${plural(nodes.length, `${role} node`)}${parts.length ? `: ${parts.join(", ")}` : ""}`;
}

function toggle(node) {
  return make("button", { type: "button", class: "name", "aria-expanded": String(open.has(nodeKey(node))) },
    make("span", { class: `dot ${node.state}`, "aria-hidden": "true" }),
    make("span", { class: "text" }, node.name),
    node.state === "ready" ? make("span", { class: "hidden" }, " ready")
      : make("span", { class: `tag ${node.state === "draining" || node.state === "loading" ? "warn" : "bad"}` }, node.state),
  );
}

function card(node, state) {
  const { kv, leased, rows, gpu } = loads(node);
  return make("li", { class: `node ${node.state}`, "data-key": nodeKey(node), "data-node": nodeKey(node) },
    toggle(node),
    meter("KV", bar(kv, leased), percent(kv)),
    meter("batch", bar(rows.share), rows.text),
    gpu && meter("GPU", bar(gpu.busy), percent(gpu.busy)),
    gpu && meter("memory", bar(gpu.memory), gpu.memoryText),
    meter("tokens/s", curve(node.history?.tokens_per_s), count(node.tokens_per_s)),
    make("p", { class: "small" },
      `${count(node.running)} running, ${count(node.waiting)} waiting`,
      node.backlog_s > 0.0005 ? `, ${seconds(node.backlog_s)} backlog` : "",
      gpu?.power ? `, ${gpu.power}` : "",
      node.also_decodes ? ", also decodes" : "",
    ),
    node.state !== "ready" && node.detail ? make("p", { class: "small bad" }, node.detail) : null,
    open.has(nodeKey(node)) ? detail(node, state) : null,
  );
}

function rows(nodes, role, state) {
  const gpus = nodes.some((node) => node.gpus?.length);
  const columns = [
    { name: "Node" }, { name: "KV" }, { name: "Batch", kind: "n" }, { name: "Waiting", kind: "n wide" },
    { name: "Tokens/s", kind: "n" },
    ...gpus ? [{ name: "GPU", kind: "n wide" }, { name: "Memory", kind: "n wide" }, { name: "Power", kind: "n wide" }] : [],
  ];
  // Nodes that need an operator come first.
  const sorted = [...nodes].sort((a, b) => (a.state === "ready") - (b.state === "ready"));
  const lines = sorted.flatMap((node) => {
    const { kv, leased, rows: batch, gpu } = loads(node);
    const line = make("tr", { class: node.state, "data-key": nodeKey(node), "data-node": nodeKey(node) },
      make("th", { scope: "row" }, toggle(node)),
      make("td", {}, make("span", { class: "level-cell" }, bar(kv, leased), percent(kv))),
      make("td", { class: "n" }, batch.text),
      make("td", { class: "n wide" }, count(node.waiting)),
      make("td", { class: "n" }, count(node.tokens_per_s)),
      gpus && [
        make("td", { class: "n wide" }, percent(gpu?.busy)),
        make("td", { class: "n wide" }, gpu?.memoryText ?? "–"),
        make("td", { class: "n wide" }, gpu?.power || "–"),
      ]);
    if (!open.has(nodeKey(node))) return [line];
    const inside = make("td", { colspan: columns.length }, detail(node, state));
    return [line, make("tr", { class: "opened", "data-key": `${nodeKey(node)} detail` }, inside)];
  });
  return table(`${role} nodes`, columns, lines);
}

// What a node carries; nothing for one that cannot be reached, whose last numbers say nothing about now.
function loads(node) {
  if (node.state === "unreachable") return { kv: NaN, leased: 0, rows: { share: 0, text: "–" }, gpu: null };
  const kv = node.blocks ? (node.blocks - node.blocks_free) / node.blocks : 0;
  const used = node.role === "decode" ? node.rows : node.running;
  return {
    kv,
    leased: node.blocks ? Math.min(node.blocks_leased / node.blocks, kv) : 0,
    rows: { share: node.seats ? used / node.seats : 0, text: `${count(used)} / ${count(node.seats)}` },
    gpu: gpuOf(node.gpus ?? []),
  };
}

// All GPUs of a node as one: their mean use, the sum of memory and power.
function gpuOf(gpus) {
  if (gpus.length === 0) return null;
  const sum = (name) => gpus.reduce((total, gpu) => total + (gpu[name] ?? 0), 0);
  const [used, total] = [sum("memory_used_bytes"), sum("memory_total_bytes")];
  return {
    busy: gpus.some((gpu) => Number.isFinite(gpu.busy_share)) ? sum("busy_share") / gpus.length : undefined,
    memory: total ? used / total : 0,
    memoryText: gigabytes(used, total),
    power: gpus.some((gpu) => Number.isFinite(gpu.power_w)) ? `${sum("power_w").toFixed(0)} W` : "",
  };
}

function gigabytes(used, total) {
  return `${(used / 1e9).toFixed(0)} / ${(total / 1e9).toFixed(0)} GB`;
}

function meter(name, picture, text) {
  return make("div", { class: "meter" }, make("span", {}, name), picture, make("span", { class: "n" }, text));
}

function bar(share, part = 0) {
  const width = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0)) * 100;
  return draw("svg", { class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    draw("rect", { class: "track", width: 100, height: 6 }),
    draw("rect", { class: share > 0.9 ? "level high" : "level", width, height: 6 }),
    draw("rect", { class: "leased", width: Math.min(part * 100, width), height: 6 }),
  );
}

function detail(node, state) {
  const history = node.history ?? {};
  const stepS = state.history_step_s ?? 0;
  return make("div", { class: "detail" },
    facts(
      ["address", node.address],
      ["state", `${node.state}${node.detail ? `: ${node.detail}` : ""}`],
      ["version", node.version],
      ["weights", node.revision_name ? `${node.revision_name} (${node.revision})` : node.revision],
      ["KV", `${node.layout}, blocks of ${node.block_size} tokens in ${node.dtype}`],
      ["blocks", `${count(node.blocks_free)} of ${count(node.blocks)} free, ${count(node.blocks_leased)} leased`],
      ["kept", (node.stores ?? []).map(kept).join("; ")],
      ["waiting", `${plural(node.waiting, "request")}, ${plural(node.tokens_waiting, "prompt token")}`],
      ["ranks", node.ranks],
      ["topology", (node.topology ?? []).join(", ")],
    ),
    make("div", { class: "histories" },
      sparkline("Requests running", history.running, stepS, count),
      sparkline("Tokens per second", history.tokens_per_s, stepS, count),
      sparkline("KV in use", history.kv_percent, stepS, (value) => `${value} %`, 100),
    ),
    node.gpus?.length ? gpuTable(node) : null,
    linksOf(node, state),
  );
}

function gpuTable(node) {
  const columns = [{ name: "GPU" }, { name: "Use", kind: "n" }, { name: "Memory", kind: "n" }, { name: "Power", kind: "n" }];
  return table(`GPUs of ${node.name}`, columns, node.gpus.map((gpu) => make("tr", {},
    make("th", { scope: "row" }, gpu.name || "GPU"),
    make("td", { class: "n" }, percent(gpu.busy_share ?? NaN)),
    make("td", { class: "n" }, gigabytes(gpu.memory_used_bytes, gpu.memory_total_bytes)),
    make("td", { class: "n" }, watts(gpu)))));
}

function kept(store) {
  const damaged = store.damaged ? `, ${count(store.damaged)} damaged` : "";
  // What comes from other nodes is counted here, and kept in host memory.
  const where = store.name === "peer" ? "other nodes" : `${store.name} ${bytes(store.bytes)}`;
  return `${where}, ${plural(store.tokens_read, "token")} read back${damaged}`;
}

function watts(gpu) {
  if (!Number.isFinite(gpu.power_w)) return "–";
  return `${gpu.power_w.toFixed(0)}${Number.isFinite(gpu.power_limit_w) ? ` / ${gpu.power_limit_w.toFixed(0)}` : ""} W`;
}

function sparkline(title, values = [], stepS, format, top) {
  const known = values.filter(Number.isFinite);
  const last = values.at(-1);
  const span = Math.round(values.length * stepS);
  const text = known.length ? `${Number.isFinite(last) ? format(last) : "–"}, at most ${format(Math.max(...known))}` : "no data yet";
  return make("figure", { class: "history" },
    make("figcaption", {}, make("b", {}, title), make("span", {}, text)),
    curve(values, top, `${title} over the last ${span} s: ${text}`));
}

// The values of the last minutes as a line; for eyes only if it has no label.
function curve(values = [], top = Math.max(1, ...values.filter(Number.isFinite)), label = null) {
  const [width, height] = [240, 34];
  const x = (index) => width - (values.length - 1 - index) * (width / Math.max(SPARKLINE_POINTS, values.length - 1));
  const y = (value) => height - 2 - (value / top) * (height - 4);
  let path = "";
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) return;
    const joined = Number.isFinite(values[index - 1]);
    path += `${joined ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    if (!joined && !Number.isFinite(values[index + 1])) path += "h1.5";
  });
  const reads = label === null ? { "aria-hidden": "true" } : { role: "img", "aria-label": label };
  return draw("svg", { class: "sparkline", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", ...reads },
    draw("line", { class: "grid", x1: 0, x2: width, y1: height - 1, y2: height - 1 }),
    draw("path", { class: "curve", d: path, "vector-effect": "non-scaling-stroke" }));
}
