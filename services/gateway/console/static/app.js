// The page of the console: draws what /api/live/stream says, once a second. All texts go in as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, text, ...classes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  made.classList.add(...classes);
  return made;
}

function shape(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const seconds = (value) => value === null ? "–" : value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
const share = (value) => value === null ? "–" : `${Math.round(100 * value)} %`;
function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (bytes >= 1000 && power < units.length - 1) { bytes /= 1000; power += 1; }
  return `${bytes >= 100 || power === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[power]}`;
}
const number = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);

function tiles(live) {
  const traffic = live.traffic;
  const bad = traffic.outcomes.server_error || 0;
  const shown = [
    [String(traffic.running), "requests under way"],
    [number(traffic.requests_per_second), "requests/s"],
    [number(traffic.generated_per_second), "tokens/s written"],
    [number(traffic.computed_per_second), "prompt tokens/s"],
    [`${size(traffic.kv_bytes_per_second)}/s`, "KV moved"],
    [seconds(traffic.ttft.p95), "TTFT p95"],
    [seconds(traffic.tpot.p95), "TPOT p95"],
    [share(traffic.attainment), "objectives kept"],
    [share(traffic.hit_rate), "cache hits"],
    [String(bad), "failed, 5 minutes"],
  ];
  $("tiles").replaceChildren(...shown.map(([value, name]) => {
    const tile = element("div", undefined, "tile");
    tile.append(element("b", value), element("span", name));
    return tile;
  }));
}

const BOX = { width: 250, height: 62, gap: 12 };

function worker(view, x, y, width) {
  const group = shape("g", { transform: `translate(${x} ${y})` });
  const used = view.blocks ? 1 - view.free_blocks / view.blocks : 0;
  const track = width - 22;
  const batch = view.role === "kv" ? "keeps prefixes" : width < 230 ? `${view.running} + ${view.waiting} waiting` : `${view.running} running, ${view.waiting} waiting`;
  group.append(
    shape("rect", { class: `box ${view.state}`, width, height: BOX.height, rx: 6 }),
    shape("rect", { class: view.role, width: 5, height: BOX.height, rx: 2 }),
    shape("text", { class: "name", x: 14, y: 18 }, latest.models.length > 1 ? `${view.name} ${view.model.slice(0, 14)}` : view.name),
    shape("text", { class: view.state === "ready" ? "dim" : "warn", x: width - 10, y: 18, "text-anchor": "end" },
      view.state === "ready" ? `${number(view.generated_per_second + view.computed_per_second)} tok/s` : view.state),
    shape("text", { class: "dim", x: 14, y: 35 }, batch),
    shape("text", { class: "dim", x: width - 10, y: 35, "text-anchor": "end" }, `KV ${share(used)}`),
    shape("rect", { class: "track", x: 14, y: 45, width: track, height: 6, rx: 3 }),
    shape("rect", { class: view.role, x: 14, y: 45, width: track * used, height: 6, rx: 3 }),
    shape("title", {}, `${view.name} (${view.role}, ${view.model}) on ${view.host}\n${view.incarnation}\n${view.blocks - view.free_blocks} of ${view.blocks} blocks in use${view.reason ? "\n" + view.reason : ""}`),
  );
  return group;
}

function topology(live) {
  const map = $("map"), width = Math.max(320, map.clientWidth || 900);
  const narrow = width < 620;
  const left = live.workers.filter((view) => view.role === "prefill");
  const right = live.workers.filter((view) => view.role !== "prefill");
  const box = narrow ? (width - 60) / 2 : BOX.width;
  const columns = left.length ? [left, right] : [right];
  const rows = Math.max(1, ...columns.map((column) => column.length));
  const height = 26 + rows * (BOX.height + BOX.gap);
  const parts = [], wires = [], plates = [], places = new Map();
  columns.forEach((column, index) => {
    const x = columns.length === 1 ? (width - box) / 2 : index ? width - box - 1 : 1;
    const offset = (rows - column.length) * (BOX.height + BOX.gap) / 2;
    const title = !left.length ? "workers" : index ? "decode" : "prefill";
    parts.push(shape("text", { class: "head", x, y: 14 }, title));
    column.forEach((view, row) => {
      const y = 24 + offset + row * (BOX.height + BOX.gap);
      places.set(view.incarnation, { x, y });
      parts.push(worker(view, x, y, box));
    });
  });
  const merged = new Map();
  for (const link of live.links) {
    const key = `${link.source} ${link.target}`, known = merged.get(key);
    if (!known) merged.set(key, { ...link });
    else { known.bytes_per_second += link.bytes_per_second; known.bytes += link.bytes; known.connector += `, ${link.connector}`; }
  }
  const busiest = Math.max(1, ...[...merged.values()].map((link) => link.bytes_per_second));
  [...merged.values()].forEach((link, index) => {
    const from = places.get(link.source), to = places.get(link.target);
    if (!from || !to || from.x === to.x) return;
    const [x1, x2] = from.x < to.x ? [from.x + box, to.x] : [from.x, to.x + box];
    const y1 = from.y + BOX.height / 2, y2 = to.y + BOX.height / 2, bend = (x2 - x1) / 3;
    const busy = link.bytes_per_second > 0;
    const wire = shape("path", { class: busy ? "wire busy" : "wire", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
    if (busy) wire.setAttribute("stroke-width", 1.5 + 4 * link.bytes_per_second / busiest);
    wire.append(shape("title", {}, `${link.source_name} → ${link.target_name}, ${link.connector}: ${size(link.bytes)} in ${link.transfers} transfers`));
    wires.push(wire);
    if (narrow) return;
    // Labels at different parts of the curves, so that crossing ones stay legible.
    const at = [0.3, 0.7, 0.5, 0.2, 0.8][index % 5], rest = 1 - at;
    const x = rest ** 3 * x1 + 3 * rest ** 2 * at * (x1 + bend) + 3 * rest * at ** 2 * (x2 - bend) + at ** 3 * x2;
    const y = (rest ** 3 + 3 * rest ** 2 * at) * y1 + (3 * rest * at ** 2 + at ** 3) * y2;
    const label = `${busy ? size(link.bytes_per_second) + "/s" : size(link.bytes)} ${link.connector}`;
    const wide = 7 + 6.6 * label.length;
    plates.push(shape("rect", { class: "plate", x: x - wide / 2, y: y - 9, width: wide, height: 18, rx: 4 }),
      shape("text", { class: busy ? "" : "dim", x, y: y + 4, "text-anchor": "middle" }, label));
  });
  map.setAttribute("viewBox", `0 0 ${width} ${height}`);
  map.setAttribute("height", height);
  map.replaceChildren(...wires, ...plates, ...parts);
}

const charts = new Map();

function chart(id, data, names, format, top) {
  const where = $(id), width = where.clientWidth;
  const colours = ["--blue", "--amber", "--teal"].map(css), dim = css("--dim"), line = css("--line");
  const look = `${width} ${colours} ${dim}`;
  let known = charts.get(id);
  if (!known || known.look !== look) {
    known?.plot.destroy();
    const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const plot = new uPlot({
      width, height: 150, legend: { show: false }, cursor: { y: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, top || (high > 0 ? 1.15 * high : 1)] } },
      axes: [{ ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map((tick) => new Date(1000 * tick).toTimeString().slice(0, 8)) }, { ...axis, size: 58, values: (_, ticks) => ticks.map(format) }],
      series: [{}, ...names.map((name, index) => ({
        label: name, stroke: colours[index], width: 2, spanGaps: true, points: { show: true, size: 4, fill: colours[index] },
        ...(index || names.length > 1 ? {} : { fill: colours[index] + "22" }),
      }))],
    }, data, where);
    known = { plot, look };
    charts.set(id, known);
  } else known.plot.setData(data);
}

function graphs(live) {
  const series = live.series, count = series.requests.length, step = series.bucket_seconds;
  const times = series.requests.map((_, index) => live.at - (count - 1 - index) * step);
  const percent = (value) => `${Math.round(100 * value)} %`;
  chart("ttft", [times, series.ttft_p50, series.ttft_p95], ["p50", "p95"], seconds);
  chart("tpot", [times, series.tpot_p50, series.tpot_p95], ["p50", "p95"], seconds);
  chart("slo", [times, series.attainment], ["kept"], percent, 1.05);
  chart("rate", [times, series.generated_per_second], ["tokens/s"], number);
  const { slo_ttft: ttft, slo_tpot: tpot } = live.traffic;
  const aims = [ttft === null ? "" : `TTFT ≤ ${seconds(ttft)}`, tpot === null ? "" : `TPOT ≤ ${seconds(tpot)}`];
  $("aims").textContent = aims.filter(Boolean).join(", ") || "none are set: --slo-ttft, --slo-tpot";
}

function hits(live) {
  const rows = element("div", undefined, "rows");
  for (const view of live.workers) {
    const cells = element("div", undefined, "cells");
    for (const value of view.hits) {
      const cell = element("i");
      if (value !== null) {
        cell.classList.add("known");
        cell.style.opacity = 0.12 + 0.88 * value;
        cell.title = share(value);
      }
      cells.append(cell);
    }
    rows.append(element("span", view.name), cells, element("span", share(view.hit_rate)));
  }
  $("hits").replaceChildren(rows);
}

function requests(live) {
  if (!live.requests.length) {
    $("requests").replaceChildren(element("p", "none in the last minutes", "empty"));
    return;
  }
  const shown = live.requests.slice(0, 12), longest = Math.max(...shown.map((each) => each.seconds), 1e-6);
  const rows = element("div", undefined, "rows");
  for (const each of shown) {
    const bar = element("div", undefined, "bar");
    bar.title = `${each.request}: ${each.prompt_tokens} + ${each.output_tokens} tokens`;
    for (const { stage, start, seconds: long, worker, attempt } of each.bars) {
      const part = element("i", undefined, stage);
      part.style.left = `${100 * start / longest}%`;
      part.style.width = `${100 * long / longest}%`;
      part.title = `${stage.replace("_", " ")} ${seconds(long)}, ${worker}${attempt ? `, attempt ${attempt + 1}` : ""}`;
      bar.append(part);
    }
    const ago = `${Math.max(0, Math.round(live.at - each.arrived - each.seconds))} s ago`;
    const what = each.outcome === "ok" ? `${each.output_tokens} tok, ${seconds(each.seconds)}` : each.outcome.replace("_", " ");
    rows.append(element("span", ago), bar, element("span", what, ...(each.outcome === "server_error" ? ["bad"] : [])));
  }
  $("requests").replaceChildren(rows);
}

function row(tag, values) {
  const made = element("tr");
  made.append(...values.map((value) => element(tag, value)));
  return made;
}

function routers(live) {
  const lines = live.routers.map((view) => row("td", view.policy
    ? [view.name, view.policy, view.mode + (view.reason ? `: ${view.reason}` : ""), share(view.precision), share(view.recall), String(view.queued), String(view.under_way)]
    : [view.name, "does not answer", "", "", "", "", ""]));
  $("routers").replaceChildren(row("th", ["router", "policy", "mode", "precision", "recall", "queued", "under way"]), ...lines);
}

// The models that the chat can ask; what was chosen stays.
function choices(live) {
  const names = live.models.filter((each) => each.state !== "not served here").map((each) => each.name);
  const shown = [...$("model").options].map((option) => option.value);
  if (names.join("\n") !== shown.join("\n")) $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  $("model").hidden = names.length < 2;
}

let latest = first;  // from state.js

function draw() {
  const models = latest.models.map((each) => each.state === "ready" ? each.name : `${each.name} (${each.state})`);
  $("about").textContent = `${models.join(", ")}, cluster ${latest.cluster}`
    + (latest.gateways.length > 1 ? `, requests of ${latest.gateways.find((each) => each.here)?.name}, one of ${latest.gateways.length} gateways` : "");
  tiles(latest); topology(latest); graphs(latest); hits(latest); requests(latest); routers(latest); choices(latest);
}

function told() {
  state(latest.connected ? "good" : "bad", latest.connected ? "live" : "cluster state lost: this is what was known last");
  draw();
}

function state(kind, text) { $("link").className = kind; $("link").textContent = text; }

function follow() {
  const stream = new EventSource("/api/live/stream");
  stream.onmessage = (event) => {
    latest = JSON.parse(event.data);
    told();
  };
  stream.onerror = () => state("bad", "the gateway does not answer");
}

const talk = [];

async function ask(event) {
  event.preventDefault();
  const text = $("prompt").value.trim() || $("prompt").placeholder, button = $("ask").querySelector("button");
  if (button.disabled) return;
  button.disabled = true;
  $("prompt").value = "";
  talk.push({ role: "user", content: text });
  const answer = element("p", "");
  $("talk").append(element("p", text, "you"), answer);
  let content = "";
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ model: $("model").value, messages: talk, stream: true, max_tokens: 256 }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "", done = false; !done;) {
      const piece = await reader.read();
      done = piece.done;
      const lines = (rest + (piece.value || "")).split("\n\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        content += chunk.choices[0]?.delta.content || "";
        answer.textContent = content;
        $("talk").scrollTop = $("talk").scrollHeight;
      }
    }
    talk.push({ role: "assistant", content });
  } catch (error) {
    talk.pop();
    answer.append(element("span", ` ${error.message}`, "bad"));
  } finally {
    button.disabled = false;
  }
}

$("ask").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
told();
follow();
