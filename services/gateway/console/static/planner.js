// The panel of the planner: its latest decision, and its forecasts against what came. Hidden where there is no planner.
"use strict";

const LATEST = 60, EVERY = 5000;  // decisions, milliseconds
const ROLES = ["prefill", "decode", "aggregated"];
let decided = decisions;  // by model, oldest first; from state.js

const known = (value) => typeof value === "number";
const part = (value) => known(value) ? share(value) : "–";

function deployment(option) {
  const apart = option.prefill || option.decode ? `${option.prefill}P${option.decode}D` : "";
  return [apart, option.aggregated ? `${option.aggregated} aggregated` : ""].filter(Boolean).join(" + ") || "no worker";
}

function action(each) {
  switch (each.kind) {
    case "flip": return `flip ${each.worker} from ${each.before} to ${each.role}`;
    case "remove": return `remove ${each.worker} (${each.role})`;
    case "add": return `add one ${each.role} worker`;
    default: return each.share ? `shed ${Math.round(100 * each.share)} % of the arrivals` : "shed nothing any more";
  }
}

// What came at the end of each window, and what had been forecast for that time; times of both, gaps where one is not known.
function arrivals(told) {
  const points = told.flatMap(({ window, forecast }) => [
    [window.at, known(window.arrivals) && window.seconds > 0 ? window.arrivals / window.seconds : null, null, null],
    ...(known(forecast.at) ? [[forecast.at, null, forecast.arrivals.mean, forecast.arrivals.upper]] : []),
  ]).sort((one, other) => one[0] - other[0]);
  return [0, 1, 2, 3].map((index) => points.map((point) => point[index]));
}

function plan() {
  const models = Object.keys(decided).filter((name) => decided[name].length);
  $("planner").hidden = !models.length;
  if (!models.length) return;
  const model = models.includes($("model").value) ? $("model").value : models[0], told = decided[model];
  const last = told[told.length - 1], chosen = last.chosen && JSON.stringify(last.chosen);
  const many = models.length > 1 ? `${model}, ` : "";
  $("planned").textContent = `${many}${last.mode}, decision ${last.number}, ${Math.max(0, Math.round(latest.at - last.at))} s ago`;
  const verb = last.mode === "act" ? "" : "would ";
  $("decided").textContent = last.actions.length ? verb + last.actions.map(action).join("; ") : "nothing is to be done";
  if (last.shed) $("decided").append(element("b", `, ${Math.round(100 * last.shed)} % of the requests are to be refused`));
  if (last.outcome && last.mode === "act" && last.actions.length) $("decided").append(element("span", `: ${last.outcome.done} of ${last.actions.length} done`, "dim"));
  for (const failed of last.outcome ? last.outcome.failed : []) $("decided").append(element("span", ` ${failed}`, "bad"));
  $("because").textContent = last.reason + (last.held ? `. Held: ${last.held}` : "");
  const wanted = (role) => last.chosen ? last.chosen[role] : last.have[role];
  $("pools").replaceChildren(row("th", ["workers", ...ROLES]), row("td", ["wanted", ...ROLES.map((role) => String(wanted(role)))]),
    row("td", ["ready", ...ROLES.map((role) => String(last.have[role] || 0))]), row("td", ["starting", ...ROLES.map((role) => String(last.coming[role] || 0))]));
  const options = last.options.map((option) => {
    const line = row("td", [deployment(option), part(option.ttft_attainment), part(option.tpot_attainment), part(option.attainment), String(option.gpus)]);
    line.append(element("td", option.note, "note"));
    if (JSON.stringify(option) === chosen) line.classList.add("chosen");
    return line;
  });
  $("options").replaceChildren(row("th", ["weighed", "TTFT kept", "TPOT kept", "both", "GPUs", ""]), ...options);
  chart("arrivals", arrivals(told), ["came", "forecast", "at most"], number);
}

async function ask_planner() {
  try {
    const response = await fetch(`/admin/planner?last=${LATEST}`);
    if (response.ok) decided = await response.json();
  } catch { /* the page says that the gateway does not answer */ }
  plan();
}

addEventListener("resize", plan);
plan();
setInterval(ask_planner, EVERY);
