// The last requests as waterfalls. A click opens one: a line for each phase, on the request's own scale.
import { $, bytes, count, draw, make, seconds } from "./dom.js";

const PHASES = {
  admission: "waits for its turn",
  lost: "failed attempts",
  blocks: "node and KV blocks",
  queue: "waits for a prefill step",
  prefill: "prompt is computed",
  transfer: "KV is transferred",
  tokens: "tokens",
};
const open = new Set();
const own = new Set(); // request ids of this page's prompts
let last = { requests: [] };

export function setUpRequests() {
  $("legend").append(...Object.keys(PHASES).map((name) => make("span", { class: `key ${name}`, title: PHASES[name] }, name)));
  $("only-slow").addEventListener("change", () => showRequests(last));
}

export function markOwn(requestId) {
  own.add(requestId);
}

export function showRequests(state) {
  last = state;
  const all = state.requests ?? [];
  const shown = $("only-slow").checked ? all.filter((each) => (each.slow ?? []).length) : all;
  $("none").hidden = shown.length > 0;
  // The scale leaves out the longest few, which would make slivers of all others.
  const totals = shown.map((each) => each.total_s).filter(Number.isFinite).sort((a, b) => a - b);
  const scale = totals[Math.min(totals.length - 1, Math.floor(totals.length * 0.9))] || 1;
  const scroll = $("rows").scrollTop;
  $("rows").replaceChildren(...shown.map((each) => row(each, scale, state.now_s)));
  $("rows").scrollTop = scroll;
}

function row(request, scale, nowS) {
  const slow = request.slow ?? [];
  const failed = request.outcome !== "finished" && request.outcome !== "cancelled";
  const path = request.receipt?.path ?? "";
  const head = make("button", { class: "row", "aria-expanded": open.has(request.key), title: slow.join("\n") },
    make("span", { class: `id${own.has(request.request_id) ? " own" : ""}` }, request.request_id ?? ""),
    make("span", { class: `tag ${failed ? "bad" : path}` }, request.outcome === "finished" ? path || "done" : request.outcome),
    make("span", { class: "n" }, request.prompt_tokens === null ? "–" : `${count(request.prompt_tokens)} → ${count(request.completion_tokens)}`),
    make("span", { class: "n" }, seconds(request.ttft_s)),
    make("span", { class: "n" }, seconds(request.gap_s)),
    bars(request, scale),
    make("span", { class: "n" }, seconds(request.total_s)),
    make("span", { class: "n quiet" }, ago(nowS - request.ended_at_s)),
  );
  const whole = make("div", { class: `request${slow.length ? " slow" : ""}`, "data-id": request.request_id }, head);
  if (slow.length) whole.append(make("p", { class: "why" }, slow.join("; ")));
  const toggle = () => {
    whole.querySelector(".detail")?.remove();
    if (open.has(request.key)) whole.append(detail(request));
    head.setAttribute("aria-expanded", open.has(request.key));
  };
  head.addEventListener("click", () => {
    if (!open.delete(request.key)) open.add(request.key);
    toggle();
  });
  toggle();
  return whole;
}

function bars(request, scale) {
  const svg = draw("svg", { class: "bars", viewBox: "0 0 1000 20", preserveAspectRatio: "none", "aria-hidden": true });
  const x = (value) => Math.max(0, Math.min(1000, (value / scale) * 1000));
  for (const [name, start, stop] of request.phases ?? []) {
    const below = name === "transfer";
    const width = Math.max(1.5, x(stop) - x(start));
    svg.append(draw("rect", { class: name, x: x(start), y: below ? 15 : 3, width, height: below ? 4 : 11 }));
  }
  for (const at of request.failed_at_s ?? []) svg.append(draw("rect", { class: "failure", x: x(at), y: 0, width: 3, height: 20 }));
  return svg;
}

function detail(request) {
  const total = request.total_s || 1;
  const lines = (request.phases ?? []).map(([name, start, stop]) => {
    const x = (value) => Math.max(0, Math.min(1000, (value / total) * 1000));
    const svg = draw("svg", { class: "bars", viewBox: "0 0 1000 16", preserveAspectRatio: "none", "aria-hidden": true },
      draw("rect", { class: name, x: x(start), y: 3, width: Math.max(2, x(stop) - x(start)), height: 10 }));
    if (name === "prefill") {
      for (const [at] of request.chunks ?? []) svg.append(draw("rect", { class: "chunk", x: x(at), y: 1, width: 1.5, height: 14 }));
    }
    return make("div", { class: "phase" }, make("span", {}, PHASES[name] ?? name), svg, make("span", { class: "n" }, seconds(stop - start)));
  });
  const receipt = request.receipt;
  const facts = [];
  const add = (name, value) => value !== null && value !== undefined && value !== "" && facts.push(make("dt", {}, name), make("dd", {}, String(value)));
  add("request", request.request_id);
  add("client", request.client);
  if (receipt) {
    add("path", `${receipt.path}: ${receipt.why}`);
    if (request.chunks?.length) add("prefill", `${request.chunks.length} chunk${request.chunks.length > 1 ? "s" : ""}, up to token ${request.chunks.at(-1)[1]}`);
    if (receipt.segments) {
      add("transfer", `${count(receipt.segments)} segments, ${bytes(receipt.bytes_sent)} over ${receipt.transport}, in ${receipt.layer_groups} layer group${receipt.layer_groups === 1 ? "" : "s"}; ${seconds(receipt.transfer_s)} after the first token${receipt.kv_converted ? `; ${receipt.kv_converted}` : ""}`);
    }
    add("cached", `${count(request.cached_tokens)} tokens not computed; ${count(receipt.prefill_cached_tokens)} on the prefill node, ${count(receipt.decode_cached_tokens)} on the decode node`);
    if (receipt.predicted_ttft_s !== null) add("predicted", `first token after ${seconds(receipt.predicted_ttft_s)}; it came after ${seconds(request.ttft_s)}`);
    add("attempts", receipt.attempts);
  }
  add("error", request.error);
  return make("div", { class: "detail" }, ...lines, make("dl", {}, ...facts));
}

function ago(passed) {
  const value = Math.max(0, passed);
  return value < 60 ? `${value.toFixed(0)} s ago` : value < 3600 ? `${Math.floor(value / 60)} min ago` : `${Math.floor(value / 3600)} h ago`;
}
