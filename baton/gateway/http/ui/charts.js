// Three charts over the last minutes, from points that the gateway keeps.
import { $, count, draw, make, seconds } from "./dom.js";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [420, 118, 52, 16, 6];

export function showCharts(charts) {
  const times = charts.at_s ?? [];
  chart($("ttft"), "Time to first token", times, [["p50", charts.ttft_p50], ["p99", charts.ttft_p99]], seconds);
  chart($("gap"), "Gap between tokens", times, [["p50", charts.gap_p50], ["p99", charts.gap_p99]], seconds);
  chart($("rate"), "Tokens per second", times, [["all", charts.tokens_per_s]], (value) => count(Math.round(value)));
}

function chart(figure, title, times, series, format) {
  const known = series.flatMap(([, values]) => (values ?? []).filter((value) => Number.isFinite(value)));
  const top = nice(Math.max(1e-3, ...known));
  const span = Math.max(60, (times.at(-1) ?? 0) - (times[0] ?? 0));
  const end = times.at(-1) ?? 0;
  const x = (time) => LEFT + (WIDTH - LEFT) * (1 - (end - time) / span);
  const y = (value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    svg.append(
      draw("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * share), y2: y(top * share) }),
      draw("text", { class: "axis", x: LEFT - 6, y: y(top * share) + 3.5, "text-anchor": "end" }, share ? format(top * share) : "0"),
    );
  }
  svg.append(
    draw("text", { class: "axis", x: LEFT, y: HEIGHT - 2 }, `${Math.round(span / 60)} min ago`),
    draw("text", { class: "axis", x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, "now"),
  );
  for (const [name, values] of series) {
    svg.append(draw("path", { class: `curve ${name}`, d: curve(times, values ?? [], x, y) }));
  }
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const caption = make("figcaption", {});
  const say = (index, when) => {
    caption.replaceChildren(make("b", {}, title), ...series.map(([name, values]) => {
      const value = values?.[index];
      return make("span", { class: `key ${name}` }, `${name === "all" ? "" : `${name} `}${Number.isFinite(value) ? format(value) : "–"}`);
    }), make("span", { class: "quiet" }, when));
  };
  say(times.length - 1, "");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = end - span * (1 - (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT));
    let index = times.findIndex((time) => time >= at);
    if (index < 0) index = times.length - 1;
    if (index < 0) return;
    cursor.setAttribute("x1", x(times[index]));
    cursor.setAttribute("x2", x(times[index]));
    cursor.setAttribute("visibility", "visible");
    say(index, `${Math.round(end - times[index])} s ago`);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    say(times.length - 1, "");
  });
  figure.replaceChildren(caption, svg);
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

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}
