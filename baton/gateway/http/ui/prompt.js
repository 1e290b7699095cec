// A conversation with this gateway's own API. Every answer shows what its hand-over moved, as its receipt says.
import { $, bytes, count, make, plural, seconds } from "./dom.js";
import { markOwn } from "./requests.js";

let running = null; // AbortController of the answer that is being received
let messages = []; // what the model gets: the turns that were answered, at least in part

// `page` has the functions state(), headers() and refresh().
export function setUpPrompt(page) {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else if (page.state() && $("text").value.trim()) send(page, $("text").value);
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || running) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    $("turns").replaceChildren();
    $("turns").hidden = true;
    $("text").focus();
  });
}

// Without a chat template a model continues one text, so a conversation would not reach it.
export function showModel(state) {
  $("model").textContent = state.model ?? "";
  $("description").textContent = state.description ?? "";
  $("description").hidden = !state.description;
  $("system-field").hidden = !state.chat;
  $("no-chat").hidden = Boolean(state.chat);
}

async function send(page, text) {
  const state = page.state();
  const requestId = `ui-${crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0")}`;
  const asked = { role: "user", content: text };
  const mine = running = new AbortController();
  markOwn(requestId);
  $("text").value = "";
  $("send").textContent = "Stop";
  $("turns").hidden = false;
  addTurn("user", "You", text);
  const turn = addTurn("model", state.model, "");
  turn.whole.setAttribute("aria-busy", "true");
  const answer = { text: "", first: null, receipt: null, usage: null };
  const begun = performance.now();
  try {
    await receive(state, page.headers(), requestId, asked, mine.signal, (kind, piece) => {
      answer.first ??= performance.now();
      if (kind === "text") answer.text += piece;
      turn[kind].append(piece);
      $("turns").scrollTop = $("turns").scrollHeight;
    }, answer);
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.figures.append(make("span", { class: stopped ? "" : "bad" }, stopped ? "Stopped. " : `${error.message} `));
    if (!stopped && !answer.text && !$("text").value) $("text").value = text;
  }
  turn.whole.setAttribute("aria-busy", "false");
  turn.figures.append(...figures(answer, begun, performance.now()));
  $("turns").scrollTop = $("turns").scrollHeight;
  if (turn.whole.isConnected && answer.text) messages.push(asked, { role: "assistant", content: answer.text });
  if (running === mine) {
    running = null;
    $("send").textContent = "Send";
  }
  page.refresh();
}

// Sends the request and gives each piece of the answer to `take`; fills in `answer.receipt` and `answer.usage`.
async function receive(state, headers, requestId, asked, signal, take, answer) {
  const system = $("system").value.trim();
  const history = [...system ? [{ role: "system", content: system }] : [], ...messages, asked];
  const body = {
    model: state.model,
    ...state.chat ? { messages: history } : { prompt: asked.content },
    max_tokens: Number($("most").value) || 128,
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  const response = await fetch(state.chat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST",
    headers: { ...headers, "content-type": "application/json", "x-request-id": requestId, "x-baton-receipt": "1" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const error = await response.json().catch(() => ({}));
    throw new Error(error.error?.message ?? `the gateway answers ${response.status}`);
  }
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices ?? [];
    const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
    if (thought) take("thought", thought);
    const piece = choice?.delta?.content ?? choice?.text;
    if (piece) take("text", piece);
    answer.receipt = event.baton?.receipt ?? answer.receipt;
    answer.usage = event.usage ?? answer.usage;
  }
}

function addTurn(kind, who, text) {
  const [thought, said, figures] = [make("p", { class: "thought" }), make("p", { class: "said" }, text), make("p", { class: "figures" })];
  const whole = make("div", { class: `turn ${kind}` }, make("b", {}, who), thought, said, figures);
  $("turns").append(whole);
  $("turns").scrollTop = $("turns").scrollHeight;
  return { whole, thought, text: said, figures };
}

function figures({ first, receipt, usage }, begun, end) {
  const found = [];
  if (receipt) found.push(make("span", { class: receipt.bytes_sent ? "moved" : "" }, handOver(receipt)));
  if (first !== null) {
    const tokens = usage?.completion_tokens;
    const rate = tokens > 1 ? `, ${count(Math.round((tokens - 1) / Math.max(1e-3, (end - first) / 1e3)))} tokens/s` : "";
    found.push(make("span", {}, `First text after ${seconds((first - begun) / 1e3)}${tokens ? `, ${plural(tokens, "token")}` : ""} in ${seconds((end - begun) / 1e3)}${rate}.`));
  }
  return found;
}

function handOver(receipt) {
  if (!receipt.bytes_sent) return `No KV moved: ${receipt.decode_node || receipt.prefill_node} served the request alone (${receipt.why}).`;
  return `${receipt.prefill_node} → ${receipt.decode_node}: ${bytes(receipt.bytes_sent)} of KV moved in ${plural(receipt.segments, "segment")} over ${receipt.transport}.`;
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
