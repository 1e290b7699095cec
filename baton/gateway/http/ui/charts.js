// Three charts over the last minutes, from points that the gateway keeps. One slider reads all three at an earlier time.
import { $, count, draw, make, seconds, show } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [420, 112, 52, 16, 6];
const CHARTS = [
  { id: "ttft", title: "Time to first token", series: [["p50", "ttft_p50"], ["p99", "ttft_p99"]], format: seconds },
  { id: "gap", title: "Gap between tokens", series: [["p50", "gap_p50"], ["p99", "gap_p99"]], format: seconds },
  { id: "rate", title: "Tokens per second", series: [["all", "tokens_per_s"]], format: (value) => count(Math.round(value)) },
];
let points = {};
let back = 0; // how many points before the newest one the slider stands

export function setUpCharts() {
  $("back").addEventListener("input", () => {
    back = -Number($("back").value);
    showCharts(points);
  });
  for (const { id } of CHARTS) {
    $(id).addEventListener("pointermove", (event) => point(event));
    $(id).addEventListener("pointerleave", () => {
      back = 0;
      showCharts(points);
    });
  }
}

export function showCharts(charts) {
  points = charts;
  const times = charts.at_s ?? [];
  const last = Math.max(0, times.length - 1);
  back = Math.min(back, last);
  const index = times.length - 1 - back;
  const when = back ? `${Math.round(times.at(-1) - times[index])} s ago` : "now";
  $("back").min = -last;
  $("back").value = -back;
  $("back").setAttribute("aria-valuetext", when);
  $("when").textContent = when;
  for (const each of CHARTS) chart(each, charts, times, index);
}

// Moves the slider to where the pointer is.
function point(event) {
  const times = points.at_s ?? [];
  const box = event.currentTarget.querySelector("svg")?.getBoundingClientRect();
  if (!box || times.length === 0) return;
  const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT);
  const at = times.at(-1) - spanOf(times) * (1 - share);
  const found = times.findIndex((time) => time >= at);
  back = found < 0 ? 0 : times.length - 1 - found;
  showCharts(points);
}

const spanOf = (times) => Math.max(60, (times.at(-1) ?? 0) - (times[0] ?? 0));

function chart({ id, title, series, format }, charts, times, index) {
  const curves = series.map(([name, field]) => [name, charts[field] ?? []]);
  const top = nice(Math.max(1e-3, ...curves.flatMap(([, values]) => values.filter(Number.isFinite))));
  const span = spanOf(times);
  const end = times.at(-1) ?? 0;
  const x = (time) => LEFT + (WIDTH - LEFT) * (1 - (end - time) / span);
  const y = (value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top);
  const values = curves.map(([name, known]) => [name, Number.isFinite(known[index]) ? format(known[index]) : "–"]);
  const read = values.map(([name, value]) => `${name === "all" ? "" : `${name} `}${value}`);
  show($(id),
    make("figcaption", {}, make("b", {}, title), values.map(([name], number) => make("span", { class: `key ${name}` }, read[number]))),
    draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${read.join(", ")}` },
      [0, 0.5, 1].map((share) => draw("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * share), y2: y(top * share) })),
      [0, 0.5, 1].map((share) => draw("text", { class: "axis", x: LEFT - 6, y: y(top * share) + 3.5, "text-anchor": "end" }, share ? format(top * share) : "0")),
      draw("text", { class: "axis", x: LEFT, y: HEIGHT - 2 }, `${Math.round(span / 60)} min ago`),
      draw("text", { class: "axis", x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, "now"),
      curves.map(([name, known]) => draw("path", { class: `curve ${name}`, d: curve(times, known, x, y) })),
      back ? draw("line", { class: "cursor", x1: x(times[index]), x2: x(times[index]), y1: TOP, y2: HEIGHT - BOTTOM }) : null,
    ));
}

function curve(times, values, x, y) {
  let path = "";
  let pen = "M";
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) {
      pen = "M";
      return;
    }
    path += `${pen}${x(times[index]).toFixed(1)} ${y(value).toFixed(1)}`;
    if (pen === "M" && !Number.isFinite(values[index + 1])) path += "h1.5";
    pen = "L";
  });
  return path;
}

// The next round number, as the top of an axis.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}
