// Asks for the state every two seconds, one question at a time, and shows it. Hidden pages ask nothing.
import { $, count, make } from "./dom.js";
import { showCharts } from "./charts.js";
import { showMap } from "./map.js";
import { setUpRequests, showRequests } from "./requests.js";
import { setUpPrompt } from "./prompt.js";

const EVERY_MS = 2000;
const LIMIT_MS = 15000;
const KEY = "baton-key"; // kept until the tab is closed
let timer = 0;
let asking = false;
let last = null;

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function poll() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  try {
    const answer = await fetch("/ui/state", { headers: headers(), signal: AbortSignal.timeout(LIMIT_MS) });
    if (answer.status === 401 || answer.status === 403) {
      lock();
      return;
    }
    if (!answer.ok) throw new Error(`the gateway answers ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    pill("bad", error.name === "TimeoutError" ? "no answer" : "unreachable");
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, EVERY_MS);
}

export const refresh = poll;

function lock() {
  const wrong = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  $("refused").textContent = wrong ? "The gateway refused this key." : "";
  $("locked").hidden = false;
  $("board").hidden = $("forget").hidden = true;
  $("totals").replaceChildren();
  last = null;
  pill("warn", "locked");
}

function show(state) {
  last = state;
  $("locked").hidden = true;
  $("board").hidden = false;
  $("forget").hidden = sessionStorage.getItem(KEY) === null;
  $("gateway").textContent = state.gateway ?? "";
  $("model").textContent = state.model ?? "";
  document.title = `Baton · ${state.model ?? ""}`;
  const all = state.sees === "cluster";
  $("cluster").hidden = $("charts").hidden = !all;
  $("board").classList.toggle("own", !all);
  if (state.draining) pill("warn", "draining");
  else if (all && !(state.nodes ?? []).some((node) => node.state === "ready")) pill("bad", "no node is ready");
  else pill("good", "serving");
  $("totals").replaceChildren();
  if (all) {
    const totals = state.totals ?? {};
    for (const name of ["running", "waiting", "finished", "failed", "refused"]) {
      const bad = name === "failed" && totals[name] > 0;
      $("totals").append(make("span", { class: bad ? "total bad" : "total" }, make("b", {}, count(totals[name])), name));
    }
    showMap(state);
    showCharts(state.charts ?? {});
  }
  $("none").textContent = state.sees === "nothing" ? "Requests are shown to clients with a key." : "No request has ended yet.";
  showRequests(state);
}

function pill(kind, text) {
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
document.addEventListener("visibilitychange", poll);
addEventListener("resize", () => last?.sees === "cluster" && showMap(last));
setUpRequests();
setUpPrompt(() => last);
poll();
