// Streams that all start at once, each by a user of its own; k6 reads every one to its end.
// k6 run --env BATON=http://127.0.0.1:8000 --env STREAMS=1000 k6_streams.js
import http from "k6/http";
import { check, sleep } from "k6";
import { Counter } from "k6/metrics";

const streams = Number(__ENV.STREAMS || 32);
const outputTokens = Number(__ENV.TOKENS || 16);
const tokens = new Counter("tokens");

export const options = {
  scenarios: { streams: { executor: "per-vu-iterations", vus: streams, iterations: 1, maxDuration: "540s" } },
  thresholds: { checks: ["rate==1"], iterations: [`count==${streams}`] },
};

// When all users begin: they are made one after the other.
export function setup() {
  return Date.now() + 3 * streams;
}

export default function (begin) {
  sleep(Math.max(0, begin - Date.now()) / 1000);
  const body = JSON.stringify({
    model: "llama",
    messages: [{ role: "user", content: `What does zip do? ${__VU}` }],
    max_tokens: outputTokens,
    ignore_eos: true,
    stream: true,
    stream_options: { include_usage: true },
  });
  const headers = { "content-type": "application/json", "x-request-id": `k6-${__VU}` };
  const url = `${__ENV.BATON || "http://127.0.0.1:8000"}/v1/chat/completions`;
  const answer = http.post(url, body, { headers, timeout: "540s" }); // k6 gives up after 60 s otherwise
  const events = (answer.body || "").split("\n\n").filter((event) => event.startsWith("data: "));
  const usage = events.length > 1 ? JSON.parse(events[events.length - 2].slice(6)).usage : null;
  check(answer, {
    "is answered": ({ status }) => status === 200,
    "ends as a stream does": () => events[events.length - 1] === "data: [DONE]",
    "has all its tokens": () => usage !== null && usage.completion_tokens === outputTokens,
    "has its own request id": ({ headers }) => headers["X-Request-Id"] === `k6-${__VU}`,
  });
  tokens.add(usage ? usage.completion_tokens : 0);
}
