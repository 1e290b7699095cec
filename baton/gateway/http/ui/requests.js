// The last requests, each with a bar of its phases. Its name opens a line for each phase, on the request's own scale.
import { $, ago, bytes, count, draw, facts, make, plural, seconds, show, table } from "./dom.js";

const PHASES = {
  admission: "waits for its turn",
  lost: "failed attempts",
  blocks: "node and KV blocks",
  queue: "waits for a prefill step",
  prefill: "prompt is computed",
  transfer: "KV is transferred",
  tokens: "tokens",
};
const COLUMNS = [
  { name: "Request" }, { name: "Path" }, { name: "Tokens", kind: "n wide" }, { name: "KV moved", kind: "n" },
  { name: "First token", kind: "n" }, { name: "Gap", kind: "n wide" }, { name: "Phases", kind: "wide phases" },
  { name: "Total", kind: "n" }, { name: "Ended", kind: "n wide" },
];
const open = new Map(); // opened requests by key, which stay in the list until they are closed
const own = new Set(); // ids of this page's requests
let last = { requests: [] };

export function setUpRequests() {
  show($("legend"), Object.keys(PHASES).map((name) => make("span", { class: `key ${name}` }, name)));
  $("only-slow").addEventListener("change", () => showRequests(last));
  $("rows").addEventListener("click", (event) => {
    const key = event.target.closest("tr[data-request]")?.dataset.request;
    if (key === undefined) return;
    if (!open.delete(key)) open.set(key, last.requests.find((each) => each.key === key) ?? {});
    showRequests(last);
  });
}

export function markOwn(requestId) {
  own.add(requestId);
}

export function showRequests(state) {
  last = { ...state, requests: withOpened(state.requests ?? []) };
  const shown = $("only-slow").checked ? last.requests.filter((each) => (each.slow ?? []).length) : last.requests;
  $("none").hidden = shown.length > 0;
  $("rows").hidden = shown.length === 0;
  // The scale leaves out the longest few, which would make slivers of all others.
  const totals = shown.map((each) => each.total_s).filter(Number.isFinite).sort((a, b) => a - b);
  const scale = totals[Math.min(totals.length - 1, Math.floor(totals.length * 0.9))] || 1;
  show($("rows"), table("Last requests", COLUMNS, shown.flatMap((each) => rows(each, scale, state.now_s))));
}

// Adds the opened requests that newer ones have pushed out of the gateway's list.
function withOpened(requests) {
  const keys = new Set(requests.map((each) => each.key));
  for (const each of requests) if (open.has(each.key)) open.set(each.key, each);
  return [...requests, ...[...open].filter(([key]) => !keys.has(key)).map(([, request]) => request)];
}

function rows(request, scale, nowS) {
  const slow = request.slow ?? [];
  const failed = request.outcome !== "finished" && request.outcome !== "cancelled";
  const path = request.receipt?.path ?? "";
  const opened = open.has(request.key);
  const lines = [make("tr", { class: slow.length ? "slow" : "", "data-key": request.key, "data-request": request.key },
    make("th", { scope: "row" },
      make("button", { type: "button", class: `name${own.has(request.request_id) ? " own" : ""}`, "aria-expanded": String(opened) },
        make("span", { class: "text" }, request.request_id ?? ""))),
    make("td", {}, make("span", { class: `tag ${failed ? "bad" : path}` }, request.outcome === "finished" ? path || "done" : request.outcome)),
    make("td", { class: "n wide" }, tokens(request)),
    make("td", { class: "n" }, request.receipt?.bytes_sent ? bytes(request.receipt.bytes_sent) : "–"),
    make("td", { class: "n" }, seconds(request.ttft_s)),
    make("td", { class: "n wide" }, seconds(request.gap_s)),
    make("td", { class: "wide phases" }, bars(request, scale)),
    make("td", { class: "n" }, seconds(request.total_s)),
    make("td", { class: "n wide" }, ago(nowS - request.ended_at_s)),
  )];
  const more = (name, ...content) => lines.push(
    make("tr", { class: name, "data-key": `${request.key} ${name}` }, make("td", { colspan: COLUMNS.length }, ...content)));
  if (slow.length) more("why", slow.join("; "));
  if (opened) more("opened", detail(request, nowS));
  return lines;
}

function tokens(request) {
  return request.prompt_tokens === null ? "–" : `${count(request.prompt_tokens)} → ${count(request.completion_tokens)}`;
}

function bars(request, scale) {
  const x = (value) => Math.max(0, Math.min(1000, (value / scale) * 1000));
  return draw("svg", { class: "bars", viewBox: "0 0 1000 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    (request.phases ?? []).map(([name, start, stop]) => {
      const below = name === "transfer";
      const width = Math.max(1.5, x(stop) - x(start));
      return draw("rect", { class: name, x: x(start), y: below ? 15 : 3, width, height: below ? 4 : 11 });
    }),
    (request.failed_at_s ?? []).map((at) => draw("rect", { class: "failure", x: x(at), y: 0, width: 3, height: 20 })));
}

function detail(request, nowS) {
  const total = request.total_s || 1;
  const x = (value) => Math.max(0, Math.min(1000, (value / total) * 1000));
  const lines = (request.phases ?? []).map(([name, start, stop]) => make("div", { class: "phase" },
    make("span", {}, PHASES[name] ?? name),
    draw("svg", { class: "bars", viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: name, x: x(start), y: 3, width: Math.max(2, x(stop) - x(start)), height: 10 }),
      name === "prefill" && (request.chunks ?? []).map(([at]) => draw("rect", { class: "chunk", x: x(at), y: 1, width: 1.5, height: 14 }))),
    make("span", { class: "n" }, seconds(stop - start))));
  const receipt = request.receipt ?? {};
  const chunks = request.chunks ?? [];
  return make("div", { class: "detail" }, lines, facts(
    ["request", request.request_id],
    ["client", request.client],
    ["ended", ago(nowS - request.ended_at_s)],
    ["tokens", tokens(request)],
    ["gap", request.gap_s === null ? null : `${seconds(request.gap_s)} between tokens`],
    ["path", receipt.path && `${receipt.path}: ${receipt.why}`],
    ["prefill", chunks.length ? `${plural(chunks.length, "chunk")}, up to token ${chunks.at(-1)[1]}` : null],
    ["transfer", receipt.segments ? moved(receipt) : null],
    ["cached", receipt.path && `${count(request.cached_tokens)} tokens not computed; ${count(receipt.prefill_cached_tokens)} on the prefill node, ${count(receipt.decode_cached_tokens)} on the decode node${readFrom(receipt)}`],
    ["drafts", receipt.drafted_tokens ? `${count(receipt.accepted_tokens)} of ${count(receipt.drafted_tokens)} draft tokens accepted` : null],
    ["predicted", Number.isFinite(receipt.predicted_ttft_s) ? `first token after ${seconds(receipt.predicted_ttft_s)}; it came after ${seconds(request.ttft_s)}` : null],
    ["attempts", receipt.attempts],
    ["error", request.error],
  ));
}

function readFrom(receipt) {
  const places = { host: "host memory", file: "files", store: "a shared store", peer: "other nodes" };
  const read = Object.entries(places)
    .map(([source, place]) => [receipt.prefill_loaded[source] + receipt.decode_loaded[source], place])
    .filter(([tokens]) => tokens > 0)
    .map(([tokens, place]) => `${count(tokens)} from ${place}`);
  return read.length ? `; of them read ${read.join(", ")}` : "";
}

function moved(receipt) {
  return `${bytes(receipt.bytes_sent)} from ${receipt.prefill_node} to ${receipt.decode_node} over ${receipt.transport}, `
    + `in ${plural(receipt.segments, "segment")} of ${plural(receipt.layer_groups, "layer group")}; `
    + `the last one ${seconds(receipt.transfer_s)} after the first token${receipt.kv_converted ? `; ${receipt.kv_converted}` : ""}`;
}
