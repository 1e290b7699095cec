// Sends the prompt to this gateway's own API and shows its stream as it comes.
import { $, seconds } from "./dom.js";
import { headers, refresh } from "./page.js";
import { markOwn } from "./requests.js";

let running = null;

export function setUpPrompt(stateNow) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const state = stateNow();
    if (state && !running && $("text").value.trim()) send(state);
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
}

async function send(state) {
  const text = $("text").value;
  const requestId = `ui-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  running = new AbortController();
  markOwn(requestId);
  $("answer").textContent = "";
  $("answer").classList.remove("bad");
  $("figures").textContent = "";
  $("send").disabled = true;
  $("stop").hidden = false;
  const begun = performance.now();
  let first = null;
  let pieces = 0;
  try {
    const question = state.chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const answer = await fetch(state.chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json", "x-request-id": requestId },
      body: JSON.stringify({ model: state.model, ...question, max_tokens: Number($("most").value) || 64, stream: true }),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `the gateway answers ${answer.status}`);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices?.[0]?.delta?.content ?? event.choices?.[0]?.text ?? "";
      if (!piece) continue;
      first ??= performance.now();
      pieces += 1;
      $("answer").append(piece);
      $("answer").scrollTop = $("answer").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      $("answer").classList.add("bad");
      $("answer").append(`${pieces ? "\n" : ""}${error.message}`);
    }
  }
  const end = performance.now();
  $("figures").textContent = first === null ? "" :
    `In this browser: first text after ${seconds((first - begun) / 1e3)}, all after ${seconds((end - begun) / 1e3)}.`;
  running = null;
  $("send").disabled = false;
  $("stop").hidden = true;
  refresh();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
