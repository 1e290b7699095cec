// Asks for the state every two seconds, one request at a time, and shows it. A hidden or paused page does not ask.
import { $, count, make, percent, plural, show as fill } from "./dom.js";
import { setUpCharts, showCharts } from "./charts.js";
import { showLinks, takeRates } from "./links.js";
import { setUpNodes, showNodes } from "./nodes.js";
import { setUpRequests, showRequests } from "./requests.js";
import { setUpPrompt, showModel } from "./prompt.js";

const EVERY_MS = 2000;
const LIMIT_MS = 15000;
const KEY = "baton-key"; // kept until the tab is closed
let timer = 0;
let asking = false;
let paused = false;
let last = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function poll() {
  clearTimeout(timer);
  if (asking || paused || document.hidden) return;
  asking = true;
  try {
    const answer = await fetch("/ui/state", { headers: headers(), signal: AbortSignal.timeout(LIMIT_MS) });
    if (answer.status === 401 || answer.status === 403) {
      lock();
      return;
    }
    if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
    const state = await answer.json();
    if (!paused) show(state);
  } catch (error) {
    pill("bad", error.name === "TimeoutError" ? "no answer" : "unreachable");
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, EVERY_MS);
}

function lock() {
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  $("refused").textContent = wrong ? "The gateway refused this key." : "";
  $("locked").hidden = false;
  $("board").hidden = $("forget").hidden = $("pause").hidden = true;
  fill($("totals"));
  last = null;
  pill("warn", "locked");
  $("key").focus();
}

// The gateway's processes: their number, and how busy the busiest one is.
function busiest(workers) {
  if (!workers.length) return null;
  const [first] = [...workers].sort((a, b) => b.busy_share - a.busy_share);
  const limit = Number.isFinite(first.limit_tokens_per_s) ? `One worker's limit: about ${count(first.limit_tokens_per_s)} tokens/s` : undefined;
  return make("span", { class: "total", title: limit }, make("b", {}, percent(first.busy_share)), ` busy, of ${plural(workers.length, "worker")}`);
}

function show(state) {
  last = state;
  $("locked").hidden = true;
  $("board").hidden = $("pause").hidden = false;
  $("forget").hidden = sessionStorage.getItem(KEY) === null;
  $("gateway").textContent = state.gateway ?? "";
  document.title = `Baton · ${state.model ?? ""}`;
  showModel(state);
  const all = state.sees === "cluster";
  $("cluster").hidden = $("charts").hidden = !all;
  $("board").classList.toggle("own", !all);
  if (state.draining) pill("warn", "draining");
  else if (all && !(state.nodes ?? []).some((node) => node.state === "ready")) pill("bad", "no node is ready");
  else pill("good", "serving");
  const totals = all ? state.totals ?? {} : {};
  fill($("totals"), Object.keys(totals).filter((name) => ["running", "waiting", "finished", "failed", "refused"].includes(name)).map((name) =>
    make("span", { class: name === "failed" && totals[name] > 0 ? "total bad" : "total" }, make("b", {}, count(totals[name])), ` ${name}`)), busiest(all ? state.workers ?? [] : []));
  if (all) {
    takeRates(state);
    showCluster();
    showCharts(state.charts ?? {});
  }
  $("none").textContent = state.sees === "nothing" ? "Requests are shown to clients with a key." : "No request has ended yet.";
  showRequests(state);
}

function showCluster() {
  if (last?.sees !== "cluster") return;
  $("mixed").hidden = !last.mixed;
  $("mixed").textContent = last.mixed ?? "";
  showNodes(last);
  $("board").classList.toggle("large", $("map").classList.contains("large"));
  showLinks(last);
}

function pill(kind, text) {
  if ($("health").textContent === text) return;
  $("health").className = `pill ${kind}`;
  $("health").textContent = text;
}

$("locked").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  poll();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Resume" : "Pause";
  $("health").textContent = "";
  pill("warn", "paused");
  poll();
});
document.addEventListener("visibilitychange", poll);
addEventListener("resize", showCluster);
setUpNodes(showCluster);
setUpCharts();
setUpRequests();
setUpPrompt({ state: () => last, headers, refresh: poll });
poll();
