"use strict";
/* Draws the page of a run from the parts that stand in it. Texts of a run reach the page only as
   text nodes (`textContent`), never as HTML. */

const RUN_COLORS = ["#2f6fd0", "#d9622b", "#2f9e5b", "#9a4fc4", "#c0392b", "#14909c", "#a8801a",
  "#d0478f", "#6b7a90", "#5a8f1c"];
const CAUSE_COLORS = {
  generate: "#3b7dd8", sampling: "#3b7dd8", tail: "#8db8f0", reward: "#e0a32e",
  environment: "#b9791a", exchange: "#8e6bd1", annotate: "#4fb3a5", update: "#2f9e5b",
  push: "#d9622b", peers: "#c0392b", evaluate: "#7a8ba3", save: "#5c6b80", report: "#a9b4c4",
  replicas: "#c0392b", other: "#c9ced6",
};
const CAUSE_TEXTS = {
  generate: "engines sample", tail: "the last, long responses", reward: "rewards are computed",
  environment: "environments or agents work", exchange: "rollouts go to the trainers",
  annotate: "columns for loss and advantage", update: "trainers compute gradients and step", push: "weights are pushed",
  peers: "other ranks are late", evaluate: "evaluation", save: "checkpoint",
  report: "certificate", other: "outside of all phases: your own code in train.py, the report, ...", sampling: "engines draw tokens",
  replicas: "another replica samples",
};
const PRESETS = {
  learning: /^(reward\/(mean|std|zero)|eval\/reward$|policy\/(loss|entropy|kl_ref|clip_frac|advantage)|rollout\/(response_length$|truncated)|value\/loss|preference\/(accuracy|margin)|reward_model\/accuracy)/,
  "engine against trainer": /^(policy\/(mismatch|correction|staleness|carried|rollout_ratio|kl_rollout)|sync\/probe)/,
  gradients: /norm(?!_layer\/)|policy\/(lr|skipped|loss_scale)/,
  time: /^(time\/|perf\/)/,
  memory: /^mem\//,
  evaluation: /^eval\//,
  all: /./,
};
const SMOOTHINGS = [1, 2, 5, 10, 20, 50, 100];
const MOST_TOKENS = 3000; // of a response, before a button shows more
const MOST_GROUPS = 200;
const MOST_PROBLEMS = 200;

// ------------------------------------------------------------------ elements

/** Make an element. Properties are set as such, `on...` as listeners; texts become text nodes. */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("aria-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined));
  return element;
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children.flat(Infinity));
  return element;
}

/** Return a text with marks for what would change or hide other text: controls, bidi, halves. */
function visible(text) {
  return String(text).replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
    (c) => `\u27e8U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`,
  );
}

function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

const percent = (value) => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)}%`;
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const known = (values) => values.filter((v) => v !== null && v !== undefined);

function labelled(text, input) {
  return h("label", {}, text, input);
}

// ------------------------------------------------------------------ data

const unpackedParts = new Map();

/** Return a promise of a part's value; null if the page does not hold it. */
function part(key) {
  if (!unpackedParts.has(key)) {
    const element = document.getElementById(`part-${key}`);
    unpackedParts.set(key, element ? unpack(element.textContent) : Promise.resolve(null));
  }
  return unpackedParts.get(key);
}

function unpack(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

let DATA = null;

const runColor = (i) => RUN_COLORS[i % RUN_COLORS.length];
const shownRuns = () => DATA.runs.map((run, i) => i).filter((i) => !state.hidden.has(String(i)));
const training = (i) => DATA.runs[i].tables.training;
const isOfEvaluation = (name) => name.startsWith("eval/") || name.startsWith("val-");
const tableOf = (i, name) => DATA.runs[i].tables[isOfEvaluation(name) ? "evaluation" : "training"];

/** Return the names of the shown runs' metrics, sorted. */
function metricNames() {
  const names = new Set();
  for (const i of shownRuns())
    for (const table of ["training", "evaluation"])
      for (const name of Object.keys(DATA.runs[i].tables[table].columns)) names.add(name);
  return [...names].sort();
}

/** Return [unit, meaning] of a metric; the glossary may name it by a pattern with <...>. */
function meaning(name) {
  if (DATA.glossary[name]) return DATA.glossary[name];
  for (const [pattern, entry] of Object.entries(DATA.glossary)) {
    const [head, tail] = pattern.split(/<\w+>/);
    if (tail !== undefined && name.startsWith(head) && name.endsWith(tail)) return entry;
  }
  return ["", ""];
}

function runningMean(values, window) {
  const result = [];
  let sum = 0, count = 0;
  const add = (v, sign) => { if (v !== null && v !== undefined) { sum += sign * v; count += sign; } };
  values.forEach((value, i) => {
    add(value, 1);
    if (i >= window) add(values[i - window], -1);
    result.push(count && value !== null && value !== undefined ? sum / count : null);
  });
  return result;
}

// ------------------------------------------------------------------ state, in the address

const FIELDS = {
  tab: "overview", run: "0", step: "", search: "", preset: "learning", smooth: "10", x: "step",
  log: "", color: "push", order: "group", text: "", least: "", most: "", row: "", group: "", only: "", settings: "", differs: "", order2: "change", theme: "",
};
const state = { ...FIELDS, hidden: new Set() };

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(FIELDS)) state[name] = given.get(name) ?? FIELDS[name];
  state.hidden = new Set((given.get("hidden") || "").split(",").filter(Boolean));
}

function writeState() {
  const given = new URLSearchParams();
  for (const [name, usual] of Object.entries(FIELDS)) if (state[name] !== usual) given.set(name, state[name]);
  if (state.hidden.size) given.set("hidden", [...state.hidden].join(","));
  history.replaceState(null, "", `#${given}`);
}

/** Change the state, and draw the tab again. */
function change(fields, { draws = true } = {}) {
  Object.assign(state, fields);
  writeState();
  if (draws) draw();
}

function chosenRun() {
  const run = Number(state.run);
  return DATA.runs[run] ? run : 0;
}

/** Return the chosen step of a run: the one asked for if it has it, else the last. */
function chosenStep(run) {
  const steps = training(run).steps;
  const asked = Number(state.step);
  if (state.step !== "" && steps.includes(asked)) return asked;
  return steps.length ? steps[steps.length - 1] : null;
}

// ------------------------------------------------------------------ the frame

const TABS = { overview: "Overview", curves: "Curves", step: "Time of steps", rollouts: "Rollouts",
  evaluations: "Evaluations", memory: "Memory", settings: "Settings" };
const DRAW = { overview: drawOverview, curves: drawCurves, step: drawStep, rollouts: drawRollouts,
  evaluations: drawEvaluations, memory: drawMemory, settings: drawSettings };

let plots = [];
let drawing = 0; // the number of times the page was drawn
let drawn = Promise.resolve(); // when the tab is complete

function draw() {
  drawing += 1;
  for (const plot of plots) plot.destroy();
  plots = [];
  const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
  const main = h("main", { id: "main", role: "tabpanel", tabIndex: -1 });
  const focused = document.activeElement?.dataset?.keep;
  document.getElementById("page").replaceChildren(header(dark), main, h("div", { id: "token", role: "status" }));
  if (!DATA.runs.length) main.append(h("p", {}, "There are no runs."));
  else drawn = Promise.resolve((DRAW[state.tab] || drawOverview)(main));
  if (focused) {
    const again = document.querySelector(`[data-keep="${focused}"]`);
    again?.focus();
    if (again?.type === "search") again.setSelectionRange(again.value.length, again.value.length);
  }
}

function header(dark) {
  const chips = DATA.runs.map((run, i) =>
    h("label", { title: visible(run.path) },
      DATA.runs.length > 1 ? h("input", { type: "checkbox", checked: !state.hidden.has(String(i)),
        data: { keep: `run${i}` },
        onchange: () => { state.hidden.has(String(i)) ? state.hidden.delete(String(i)) : state.hidden.add(String(i)); change({}); } }) : null,
      " ", dot(i), visible(run.name)));
  const when = new Date(DATA.written_unix_s * 1000).toISOString().slice(0, 19).replace("T", " ");
  return h("header", {},
    h("div", { className: "row spread" },
      h("h1", {}, DATA.runs.map((run) => visible(run.name)).join(", ") || "no run"),
      h("div", { className: "row small" }, chips,
        h("span", { className: "pale", id: "written" }, `written ${when} UTC` + (DATA.reload_s ? `, again every ${DATA.reload_s} s` : "")),
        h("button", { data: { keep: "theme" }, onclick: () => change({ theme: dark ? "light" : "dark" }) }, dark ? "light" : "dark"))),
    h("nav", { role: "tablist" }, Object.entries(TABS).map(([name, text]) =>
      h("button", { role: "tab", id: `tab-${name}`, "aria-selected": String(state.tab === name), "aria-controls": "main",
        data: { keep: `tab-${name}` }, onclick: () => { change({ tab: name }); scrollTo(0, 0); }, onkeydown: moveTab }, text))));
}

function moveTab(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const names = Object.keys(TABS);
  const next = names[(names.indexOf(state.tab) + by + names.length) % names.length];
  change({ tab: next });
  document.getElementById(`tab-${next}`).focus();
}

const dot = (i) => h("span", { className: "dot", style: { background: runColor(i) } });

function runSelect() {
  if (DATA.runs.length < 2) return null;
  return labelled("run", h("select", { data: { keep: "run" }, onchange: (e) => change({ run: e.target.value }) },
    DATA.runs.map((run, i) => h("option", { value: String(i), selected: i === chosenRun() }, visible(run.name)))));
}

/** Return a field of the state as a search box that draws again some time after the last key. */
function searchBox(field, hint, { type = "search", onchange = null } = {}) {
  let timer = 0;
  return h("input", { type, value: state[field], placeholder: hint, data: { keep: field }, step: "any",
    "aria-label": hint,
    oninput: (e) => { clearTimeout(timer); const value = e.target.value;
      timer = setTimeout(() => { change({ [field]: value }, { draws: !onchange }); if (onchange) onchange(); }, 200); } });
}

function choice(text, field, options, { onchange = null } = {}) {
  return labelled(text, h("select", { data: { keep: field },
    onchange: (e) => { change({ [field]: e.target.value }, { draws: !onchange }); if (onchange) onchange(); } },
    options.map(([value, name]) => h("option", { value, selected: state[field] === value }, name))));
}

function tick(text, field) {
  return labelled("", h("span", {}, h("input", { type: "checkbox", checked: Boolean(state[field]), data: { keep: field },
    onchange: (e) => change({ [field]: e.target.checked ? "1" : "" }) }), ` ${text}`));
}

/** Return the step of a list that is nearest to one. */
const nearest = (steps, asked) => steps.reduce((a, b) => (Math.abs(b - asked) < Math.abs(a - asked) ? b : a));

/** Return the controls that choose a step of a list; a number may be typed of any step of `all`. */
function stepControls(steps, step, all = steps) {
  const at = steps.indexOf(step);
  const go = (to) => change({ step: String(steps[Math.max(0, Math.min(steps.length - 1, to))]) });
  return h("span", { className: "row" },
    h("button", { onclick: () => go(at - 1), title: "step before", "aria-label": "step before", data: { keep: "before" } }, "\u2190"),
    labelled("step", h("input", { type: "number", value: step, min: steps[0], max: steps[steps.length - 1], data: { keep: "step" },
      onchange: (e) => change({ step: String(nearest(all, Number(e.target.value))) }) })),
    h("button", { onclick: () => go(at + 1), title: "next step", "aria-label": "next step", data: { keep: "next" } }, "\u2192"),
    h("input", { type: "range", min: 0, max: steps.length - 1, value: at, "aria-label": "step", data: { keep: "range" },
      style: { width: "18em" }, onchange: (e) => go(Number(e.target.value)) }));
}

// ------------------------------------------------------------------ charts

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(unit) {
  const common = { stroke: css("--pale"), grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid") },
    font: "11px system-ui, sans-serif" };
  return [{ ...common, size: 30 }, { ...common, size: 58, values: (u, ticks) => ticks.map((v) => num(v, 3)) }];
}

/** Return a panel of one metric over the shown runs. It draws when it comes into view. */
function metricPanel(name, { pick = null } = {}) {
  const [unit, about] = meaning(name);
  const value = h("div", { className: "value small" });
  const plot = h("div", { className: "plot" });
  const panel = h("div", { className: "chart", data: { metric: name } },
    h("h3", {}, visible(name), unit && unit !== "1" ? h("span", { className: "pale" }, `, ${unit}`) : null),
    h("div", { className: "about small pale", title: about }, about), value, plot);
  whenSeen(panel, () => drawMetric(name, plot, value, pick || ((step) => change({ step: String(step) }, { draws: false }))));
  return panel;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries)
    if (entry.isIntersecting) {
      seen.unobserve(entry.target);
      entry.target.drawNow();
    }
}, { rootMargin: "300px" });

function whenSeen(element, work) {
  element.drawNow = work;
  seen.observe(element);
}

/** Return {x, values} of a metric of a run: by step, or by minutes since the run's first row. */
function seriesOf(run, name) {
  const table = tableOf(run, name);
  const values = table.columns[name];
  if (!values) return null;
  if (state.x !== "minutes") return { x: table.steps, values };
  const first = Math.min(...known(training(run).unix_s), ...known(table.unix_s));
  return { x: table.unix_s.map((s) => (s === null ? null : (s - first) / 60)), values };
}

function drawMetric(name, plot, value, pick) {
  const runs = shownRuns().map((i) => [i, seriesOf(i, name)]).filter(([, s]) => s && known(s.values).length);
  const window = isOfEvaluation(name) ? 1 : Number(state.smooth);
  const xs = [...new Set(runs.flatMap(([, s]) => known(s.x)))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const data = [xs];
  const series = [{}];
  for (const [i, own] of runs) {
    const smooth = window > 1 ? runningMean(own.values, window) : own.values;
    for (const [values, isPale] of window > 1 ? [[own.values, true], [smooth, false]] : [[smooth, false]]) {
      const column = new Array(xs.length).fill(undefined);
      own.x.forEach((x, k) => { if (x !== null) column[place.get(x)] = values[k]; });
      data.push(column);
      series.push({ stroke: runColor(i) + (isPale ? "55" : ""), width: isPale ? 1 : 1.8, spanGaps: true,
        points: { show: own.values.length < 40 && !isPale, size: 5 } });
    }
  }
  const isLog = state.log && runs.every(([, s]) => known(s.values).every((v) => v > 0));
  const per = window > 1 ? 2 : 1;
  const tell = (u) => {
    const at = u.cursor.idx;
    const last = at === null || at === undefined;
    value.replaceChildren(...runs.map(([i], k) => {
      const column = u.data[1 + per * k];
      let here = last ? column.length - 1 : at;
      while (here > 0 && (column[here] === undefined || column[here] === null)) here -= 1;
      return h("span", {}, k ? "   " : "", dot(i), num(column[here]),
        h("span", { className: "pale" }, ` at ${num(u.data[0][here], 6)}`));
    }));
  };
  const chart = new uPlot({
    width: plot.clientWidth || 360, height: 190, series, axes: axes(), legend: { show: false },
    scales: { x: { time: false }, y: { distr: isLog ? 3 : 1, range: isLog ? undefined : rangeOf } },
    cursor: { sync: { key: `x-${state.x}` }, drag: { x: true, y: false } },
    hooks: { setCursor: [tell], ready: [tell], draw: [markStep] },
  }, data, plot);
  chart.over.addEventListener("click", () => {
    if (chart.cursor.idx === null || chart.cursor.idx === undefined || state.x === "minutes") return;
    pick(chart.data[0][chart.cursor.idx]);
    for (const other of plots) other.redraw(false);
  });
  plots.push(chart);
}

/** Return the bounds of an axis: a little more than the values, also where they are all equal. */
function rangeOf(u, low, high) {
  if (low === null) return [0, 1];
  const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** Draw a line at the chosen step. */
function markStep(u) {
  if (state.step === "" || state.x === "minutes") return;
  const x = Math.round(u.valToPos(Number(state.step), "x", true));
  if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
  u.ctx.save();
  u.ctx.strokeStyle = css("--accent");
  u.ctx.setLineDash([4, 4]);
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.restore();
}

/** Return stacked bars of {cause: seconds of each step}; a click chooses a step. */
function stackedBars(steps, byCause, { height = 220 } = {}) {
  const causes = Object.keys(byCause);
  const plot = h("div", { className: "plot" });
  const value = h("div", { className: "value small" }, "Point at a bar for its numbers.");
  const panel = h("div", { className: "chart" }, legend(causes), value, plot);
  whenSeen(panel, () => {
    const width = plot.clientWidth || 800;
    const per = Math.max(1, Math.ceil(steps.length / Math.max(50, width / 4)));
    const bins = [];
    for (let at = 0; at < steps.length; at += per) bins.push([at, Math.min(steps.length, at + per)]);
    const sums = bins.map(() => 0);
    const stacked = causes.map((cause) => bins.map(([a, b], k) => (sums[k] += mean(byCause[cause].slice(a, b)))));
    const tell = (u) => {
      const at = u.cursor.idx;
      if (at === null || at === undefined) return;
      const [a, b] = bins[at];
      const own = causes.map((cause) => [cause, mean(byCause[cause].slice(a, b))]).filter(([, s]) => s > 0).sort((x, y) => y[1] - x[1]);
      value.textContent = `${b - a > 1 ? `steps ${steps[a]} to ${steps[b - 1]}` : `step ${steps[a]}`}: ${num(sums[at], 3)} s; ` + own.map(([cause, s]) => `${cause} ${num(s, 3)}`).join(", ");
    };
    const bars = uPlot.paths.bars({ size: [0.92, 60], align: 0 });
    const series = causes.map((cause) => ({ fill: CAUSE_COLORS[cause] || "#999", stroke: CAUSE_COLORS[cause] || "#999", width: 0, paths: bars, points: { show: false } }));
    const chart = new uPlot({
      width, height, legend: { show: false }, axes: axes(), series: [{}, ...series.reverse()],
      scales: { x: { time: false, range: (u, low, high) => [low - 0.7 * per, high + 0.7 * per] }, y: { range: (u, low, high) => [0, high * 1.05 || 1] } },
      cursor: { drag: { x: true, y: false } }, hooks: { draw: [markStep], setCursor: [tell] },
    }, [bins.map(([a]) => steps[a]), ...stacked.slice().reverse()], plot);
    chart.over.addEventListener("click", () => { if (chart.cursor.idx !== null) change({ step: String(chart.data[0][chart.cursor.idx]) }); });
    plots.push(chart);
    if (per > 1) panel.append(h("div", { className: "small pale" }, `each bar is the mean of ${per} steps`));
  });
  return panel;
}

function legend(causes) {
  return h("div", { className: "row small" }, causes.map((cause) =>
    h("span", { title: CAUSE_TEXTS[cause] || cause }, h("span", { className: "dot", style: { background: CAUSE_COLORS[cause] || "#999", borderRadius: "2px" } }), cause === "other" ? "outside of all phases" : cause)));
}

// ------------------------------------------------------------------ overview

function drawOverview(main) {
  if (DATA.left_out) main.append(h("p", { className: "note" }, DATA.left_out));
  for (const i of shownRuns()) main.append(runCard(i));
  main.append(h("h2", {}, "Curves"), h("div", { className: "charts" },
    ["reward/mean", "eval/reward", "policy/loss", "rollout/response_length", "policy/entropy", "policy/mismatch_k3", "policy/grad_norm", "perf/step_s"]
      .filter((name) => shownRuns().some((i) => seriesOf(i, name)))
      .map((name) => metricPanel(name, { pick: (step) => change({ step: String(step), tab: "step" }) }))));
  if (shownRuns().some((i) => training(i).steps.length)) main.append(h("p", { className: "small pale" },
    "A click on a curve opens that step. Pale: each step; strong: running mean. Steps count from 0."));
}

function runCard(i) {
  const run = DATA.runs[i];
  const { steps, columns } = training(i);
  const facts = [];
  if (steps.length) {
    const done = steps[steps.length - 1] + 1;
    facts.push(run.steps ? `${done} of ${run.steps} steps` : `${done} steps`);
  }
  const edge = Math.max(1, Math.ceil(steps.length / 10));
  const ends = (name) => {
    const values = known(columns[name] || []);
    return values.length ? [mean(values.slice(0, edge)), mean(values.slice(-edge))] : null;
  };
  for (const [name, text, unit] of [["reward/mean", "reward", ""], ["perf/step_s", "step", " s"], ["perf/tokens_per_s", "speed", " tokens/s"], ["rollout/response_length", "response", " tokens"], ["policy/entropy", "entropy", " nats"]]) {
    const two = ends(name);
    if (two) facts.push(`${text} ${num(two[0], 3)} \u2192 ${num(two[1], 3)}${unit}`);
  }
  const evals = run.evaluations.filter((one) => one.all.reward);
  if (evals.length) {
    const best = evals.reduce((a, b) => (b.all.reward[0] > a.all.reward[0] ? b : a));
    facts.push(`best evaluation ${num(best.all.reward[0], 3)} after ${best.step} steps`);
  }
  return h("section", {},
    h("h2", {}, dot(i), visible(run.name), h("span", { className: "pale small" }, ` ${visible(run.path)}`)),
    h("div", {}, facts.join("; ") || "No step was recorded yet."),
    findings(i),
    run.sentence ? h("div", { className: "say" }, run.sentence) : null,
    run.forecast && run.forecast.curve.length ? h("div", { className: "say" }, run.forecast.text) : null,
    run.notes.map((note) => h("div", { className: "note" }, visible(note))));
}

// ------------------------------------------------------------------ curves

function drawCurves(main) {
  const smooth = h("input", { type: "range", min: 0, max: SMOOTHINGS.length - 1, data: { keep: "smooth" },
    "aria-label": "smoothing, steps", value: Math.max(0, SMOOTHINGS.indexOf(Number(state.smooth))),
    onchange: (e) => change({ smooth: String(SMOOTHINGS[Number(e.target.value)]) }) });
  main.append(h("div", { className: "row" },
    searchBox("search", "search metrics"),
    h("span", { className: "row" }, Object.keys(PRESETS).map((name) =>
      h("button", { "aria-pressed": String(state.preset === name && !state.search), data: { keep: `preset-${name}` },
        onclick: () => change({ preset: name, search: "" }) }, name))),
    labelled(`running mean of ${state.smooth} step${state.smooth === "1" ? "" : "s"}`, smooth),
    choice("x", "x", [["step", "step"], ["minutes", "minutes"]]), tick("log y", "log")));
  const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
  const names = metricNames().filter((name) => words.length
    ? words.every((word) => name.toLowerCase().includes(word) || meaning(name)[1].toLowerCase().includes(word))
    : (PRESETS[state.preset] || PRESETS.all).test(name));
  main.append(h("p", { className: "small pale" }, `${names.length} of ${metricNames().length} metrics. ` +
    "A click marks a step, a drag zooms, a double click zooms out."));
  if (!names.length) main.append(h("p", {}, metricNames().length ? "No metric has these words." : "No metric was recorded yet."));
  if (state.preset === "gradients" && !words.length)
    for (const i of shownRuns())
      for (const [model, own] of Object.entries(DATA.runs[i].layer_norms)) main.append(layerMap(i, model, own));
  main.append(h("div", { className: "charts" }, names.map((name) => metricPanel(name))));
}

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

/** Return a color between the first of VIRIDIS (0) and the last (1). */
function viridis(share) {
  const at = share * (VIRIDIS.length - 1);
  const from = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return `rgb(${VIRIDIS[from].map((c, k) => Math.round(c + (at - from) * (VIRIDIS[from + 1][k] - c))).join()})`;
}

/** Draw a model's gradient norms, layer by step, in colors on a logarithmic scale. A click marks a step. */
function layerMap(run, model, { layers, text }) {
  const { steps, columns } = training(run);
  const rows = layers.map(([, name]) => columns[name]);
  const at = steps.map((_, k) => k).filter((k) => rows.some((row) => row[k] > 0));
  if (!at.length) return "";
  const all = rows.flatMap((row) => row.filter((v) => v > 0));
  const low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
  const value = h("div", { className: "value small" }, "Point at the map for a value.");
  const plot = h("div", { className: "plot" });
  const panel = h("div", { className: "chart", data: { layers: model } },
    h("h3", {}, dot(run), visible(`gradient norm by layer, ${model}`)), text ? h("div", { className: "say" }, text) : null, value, plot,
    h("div", { className: "small pale" }, `${num(low, 3)} `, h("span", { className: "bar", style: { width: "9em", background: `linear-gradient(90deg, ${VIRIDIS.map((c, k) => viridis(k / (VIRIDIS.length - 1))).join()})` } }),
      ` ${num(high, 3)}, logarithmic; empty: 0 or not recorded`));
  whenSeen(panel, () => {
    const left = 70, line = Math.max(4, Math.min(16, Math.floor(420 / rows.length)));
    const width = plot.clientWidth || 800, height = rows.length * line + 18, sharp = devicePixelRatio || 1;
    const count = Math.min(at.length, Math.floor(width - left)), cell = (width - left) / count;
    const bins = Array.from({ length: count }, (_, b) => at.slice(Math.floor((b * at.length) / count), Math.floor(((b + 1) * at.length) / count)));
    const norm = (row, bin) => { const own = bin.map((k) => row[k]).filter((v) => v > 0); return own.length ? mean(own) : null; };
    const canvas = h("canvas", { width: width * sharp, height: height * sharp, style: { width: `${width}px`, height: `${height}px` }, role: "img", "aria-label": `gradient norms of ${rows.length} layers over ${at.length} steps` });
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    pen.font = "11px system-ui, sans-serif";
    rows.forEach((row, r) => bins.forEach((bin, b) => {
      const own = norm(row, bin);
      if (own === null) return;
      pen.fillStyle = viridis(Math.log(own / low) / (Math.log(high / low) || 1));
      pen.fillRect(left + b * cell, r * line, cell + 0.5, line);
    }));
    pen.fillStyle = css("--pale");
    for (let r = 0; r < rows.length; r += Math.ceil(11 / line)) pen.fillText(layers[r][0], 0, r * line + Math.min(line, 11));
    pen.fillText(`step ${steps[at[0]]}`, left, height - 4);
    pen.textAlign = "right";
    if (count > 1) pen.fillText(String(steps[at[at.length - 1]]), width, height - 4);
    const under = (event) => {
      const bin = bins[Math.floor((event.offsetX - left) / cell)], r = Math.floor(event.offsetY / line);
      return bin && rows[r] ? [bin, r] : [null, 0];
    };
    canvas.addEventListener("mousemove", (event) => {
      const [bin, r] = under(event);
      if (bin) value.textContent = `layer ${layers[r][0]}, step ${steps[bin[0]]}: ${num(norm(rows[r], bin))}`;
    });
    canvas.addEventListener("click", (event) => { const [bin] = under(event); if (bin) change({ step: String(steps[bin[0]]) }); });
    plot.append(canvas);
  });
  return panel;
}

// ------------------------------------------------------------------ a step

function drawStep(main) {
  const i = chosenRun();
  const run = DATA.runs[i];
  const { steps, columns } = training(i);
  if (!steps.length) {
    main.append(h("div", { className: "row" }, runSelect()), h("p", {}, "No step was recorded yet."));
    return;
  }
  const step = chosenStep(i);
  const at = steps.indexOf(step);
  main.append(h("div", { className: "row" }, runSelect(), stepControls(steps, step)));
  if (run.sentence) main.append(h("div", { className: "say" }, run.sentence));
  const { path, path_steps: pathSteps, mean_steps: count } = run.times;
  if (pathSteps.length) main.append(h("h2", {}, "Seconds of each step along its critical path, by cause"), stackedBars(pathSteps, path));
  if (pathSteps.length < steps.length)
    main.append(h("h2", {}, "Seconds of each step on rank 0, by cause"),
      pathSteps.length ? h("p", { className: "small pale" }, "The timelines of some steps are not on the page; this is what rank 0 alone measured.") : "",
      stackedBars(steps, run.times.steps));
  const place = h("div", { id: "timeline" });
  main.append(h("h2", {}, `Timeline of step ${step}`), place);
  const timeline = drawTimeline(place, i, step);
  main.append(h("div", { className: "row", style: { alignItems: "flex-start", gap: "1.5em" } },
    pathSteps.includes(step)
      ? h("div", {}, h("h3", {}, `Step ${step}: along its critical path`), causeTable(pathSteps, path, pathSteps.indexOf(step), count))
      : h("div", {}, h("h3", {}, `Step ${step}: rank 0`), causeTable(steps, run.times.steps, at, count)),
    Object.keys(run.times.engines).length
      ? h("div", {}, h("h3", {}, `Step ${step}: engines (mean over replicas)`), causeTable(steps, run.times.engines, at, count)) : null));
  if (Object.keys(run.times.engines).length)
    main.append(h("h2", {}, "Seconds of each step of the engines: sampling, and idle by cause"), stackedBars(steps, run.times.engines, { height: 170 }));
  main.append(h("h2", {}, `What changed at step ${step}?`), changes(steps, columns, at));
  if (run.rollouts.length) {
    const near = nearest(run.rollouts, step);
    main.append(h("p", { id: "to-rollouts" }, near === step ? "" : "The rollouts of this step are not on the page. The nearest step that has them: ",
      h("button", { onclick: () => change({ tab: "rollouts", step: String(near) }) }, `rollouts of step ${near}`)));
  }
  return timeline;
}

/** Return a table of a step's seconds by cause, and of their means over the last `count` steps. */
function causeTable(steps, byCause, at, count) {
  const newest = steps.slice(-count);
  const causes = Object.keys(byCause);
  const total = causes.reduce((sum, cause) => sum + byCause[cause][at], 0);
  const rows = causes.map((cause) => [cause, byCause[cause][at], mean(byCause[cause].slice(-count))]).sort((a, b) => b[1] - a[1]);
  return h("table", {}, h("thead", {}, h("tr", {}, ["cause", "s", "share", "", `mean of steps ${newest[0]} to ${newest[newest.length - 1]}, s`].map((text) => h("th", {}, text)))),
    h("tbody", {}, rows.map(([cause, seconds, usual]) => h("tr", {},
      h("td", { title: CAUSE_TEXTS[cause] || "" }, h("span", { className: "dot", style: { background: CAUSE_COLORS[cause] || "#999", borderRadius: "2px" } }), cause,
        h("span", { className: "pale small" }, `  ${CAUSE_TEXTS[cause] || ""}`)),
      h("td", {}, num(seconds, 3)), h("td", {}, total ? percent(seconds / total) : ""),
      h("td", { className: "text" }, h("span", { className: "bar", style: { width: `${total ? (70 * seconds) / total : 0}px`, background: CAUSE_COLORS[cause] || "#999" } })),
      h("td", {}, num(usual, 3))))));
}

const PHASE_CAUSES = { await_rollouts: "peers", await_peers: "peers", await_other_replicas: "peers", agree_to_stop: "peers",
  exchange_scalars: "exchange", exchange_tokens: "exchange", advantages: "annotate", reward_model: "annotate", verify_push: "push",
  gather_evaluation: "evaluate", certificate: "report", engine_idle_reward: "reward", engine_idle_environment: "environment",
  begin_checkpoint: "save", copy_checkpoint: "save", write_checkpoint: "save", checkpoint: "save", "await_the_replica_s_leader": "peers", exchange_drawn_tokens: "generate" };
const phaseColor = (name) => CAUSE_COLORS[name] || CAUSE_COLORS[PHASE_CAUSES[name]] || "#999";

async function drawTimeline(place, run, step) {
  const turn = drawing;
  if (!DATA.runs[run].timeline.includes(step)) {
    place.append(h("p", { className: "pale" }, "The timeline of this step is not on the page."));
    return;
  }
  const chunk = await part(`timeline-${run}-${step}`).catch(() => null);
  if (turn !== drawing) return;
  if (!chunk) {
    place.append(h("p", { className: "note" }, "The timeline of this step cannot be unpacked."));
    return;
  }
  const total = chunk.path.reduce((sum, [, , , seconds]) => sum + seconds, 0);
  const byPhase = new Map();
  for (const [rank, name, , seconds] of chunk.path) {
    const key = `${phaseText(name)} on rank ${rank}`;
    byPhase.set(key, (byPhase.get(key) || 0) + seconds);
  }
  const largest = [...byPhase].sort((a, b) => b[1] - a[1]).slice(0, 4).filter(([, s]) => s > 0.01 * total);
  place.append(h("div", { className: "say" },
    `Critical path, ${num(total, 3)} s: ` +
      largest.map(([key, seconds]) => `${key} ${percent(seconds / (total || 1))}`).join(", ") + ". Only a faster phase on this path makes the step shorter.",
    chunk.waits.length ? h("div", {}, `The longest wait: ${waitText(chunk.waits[0])}.`) : null));
  const causes = new Set(chunk.ranks.flatMap((r) => r[5].map((s) => causeOf(s[0]))));
  if (chunk.ranks.some((r) => outsideOf(r).length)) causes.add("other");
  place.append(legend([...causes]),
    timelineRows(chunk, 64), waitsTable(chunk.waits));
}

/** Return the stretches of a rank, [[begin, end]], in which it was in no phase; `line` is one of the chunk's `ranks`. */
function outsideOf([, , , offset, , spans]) {
  const stretches = [];
  let at = offset;
  for (const [, begin, seconds] of spans) {
    if (begin - at > 1e-3) stretches.push([at, begin]);
    at = Math.max(at, begin + seconds);
  }
  return stretches;
}

const inPhase = (name) => (name === "other" ? "outside of all phases" : `in ${visible(name)}`);
const phaseText = (name) => (name === "other" ? "outside of all phases" : visible(name));
const causeOf = (name) => (CAUSE_COLORS[name] ? name : PHASE_CAUSES[name] || "other");
const waitText = ([name, rank, other, , seconds, doing]) =>
  `rank ${rank} waited ${num(seconds, 3)} s in ${visible(name)} for rank ${other}, which was ${inPhase(doing)}`;

/** Draw a row for each rank: its phases, nested ones inside; striped where it waited; underlined on the critical path. */
function timelineRows(chunk, most) {
  const left = 96, width = Math.min(1600, Math.max(700, document.documentElement.clientWidth - 60)), line = 34;
  const end = Math.max(1e-9, ...chunk.ranks.flatMap(([, , , offset, , spans]) => [offset, ...spans.map((s) => s[1] + s[2])]));
  const x = (seconds) => left + ((width - left - 12) * seconds) / end;
  const shown = chunk.ranks.slice(0, most);
  const rows = new Map(shown.map(([rank], k) => [rank, k]));
  const place = h("div", { className: "scroll" });
  const parts = [svg("defs", {}, svg("pattern", { id: "waits", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("rect", { width: 3, height: 6, fill: css("--back"), opacity: 0.65 })))];
  const rect = (x0, x1, y, height, fill, text, extra = {}) => {
    const box = svg("rect", { x: x(x0), y, width: Math.max(0.6, x(x1) - x(x0)), height, fill, ...extra });
    box.append(svg("title", {}, text));
    return box;
  };
  const tick = 10 ** Math.floor(Math.log10(end)), per = end / tick > 5 ? tick : end / tick > 2 ? tick / 2 : tick / 5;
  for (let at = 0; at <= end; at += per) {
    parts.push(svg("line", { x1: x(at), x2: x(at), y1: 14, y2: 18 + shown.length * line, stroke: css("--grid") }),
      svg("text", { x: x(at) + 2, y: 11, class: "pale" }, `${num(at, 3)} s`));
  }
  shown.forEach(([rank, host, replica, , leftOut, spans], k) => {
    const y = 20 + k * line;
    const label = svg("text", { x: 0, y: y + 15 }, `rank ${rank}`, replica >= 0 ? ` (engine ${replica})` : " (trainer)");
    label.append(svg("title", {}, `${visible(host)}${leftOut ? `; ${leftOut} spans were not recorded` : ""}`));
    parts.push(label);
    for (const [begin, stop] of outsideOf(shown[k]))
      parts.push(rect(begin, stop, y, 22, CAUSE_COLORS.other, `rank ${rank}: ${num(stop - begin, 3)} s from ${num(begin, 4)} s ${CAUSE_TEXTS.other}`, { stroke: css("--pale"), "stroke-width": 0.5, class: "outside" }));
    const open = [];
    for (const [name, begin, seconds, waits] of spans) {
      while (open.length && open[open.length - 1] <= begin + 1e-9) open.pop();
      const depth = Math.min(open.length, 3);
      open.push(begin + seconds);
      parts.push(rect(begin, begin + seconds, y + 4 * depth, 22 - 8 * depth, phaseColor(name),
        `rank ${rank}: ${visible(name)}, ${num(seconds, 3)} s from ${num(begin, 4)} s` + (waits ? `; ${waits} wait here` : "")));
      if (!depth && x(begin + seconds) - x(begin) > 8 * name.length)
        parts.push(svg("text", { x: x(begin) + 4, y: y + 15, fill: "#fff", class: "inside" }, visible(name)));
    }
  });
  for (const wait of chunk.waits) {
    const [, rank, other, begin, seconds] = wait;
    if (!rows.has(rank)) continue;
    const y = 20 + rows.get(rank) * line;
    parts.push(rect(begin, begin + seconds, y, 22, "url(#waits)", waitText(wait)));
    if (rows.has(other) && x(seconds) - x(0) > 6) {
      const from = 20 + rows.get(other) * line + 11, to = y + 11, at = x(begin + seconds);
      parts.push(svg("path", { d: `M${at},${from} L${at},${to}`, stroke: css("--text"), "stroke-width": 1.2, "stroke-dasharray": "3 2" }),
        svg("circle", { cx: at, cy: from, r: 3, fill: css("--text") }));
    }
  }
  for (const [rank, name, begin, seconds] of chunk.path)
    if (rows.has(rank)) parts.push(rect(begin, begin + seconds, 20 + rows.get(rank) * line + 24, 4, css("--text"), `critical path: ${phaseText(name)} on rank ${rank}, ${num(seconds, 3)} s`));
  place.append(svg("svg", { width, height: 26 + shown.length * line, role: "img", "aria-label": "timeline of the ranks" }, parts),
    h("p", { className: "small pale" }, "Striped: the rank waits for another one; the dot is at the rank that entered last. Black line below: the critical path."));
  if (chunk.ranks.length > most)
    place.append(h("button", { onclick: () => place.replaceWith(timelineRows(chunk, Infinity)) }, `show all ${chunk.ranks.length} ranks`));
  return place;
}

function waitsTable(waits) {
  if (!waits.length) return h("p", { className: "pale" }, "No rank waited for another one, or one rank alone recorded the step.");
  return h("table", {}, h("thead", {}, h("tr", {}, ["rank", "waited, s", "in", "for rank", "which was"].map((t) => h("th", { className: ["in", "which was"].includes(t) ? "text" : "" }, t)))),
    h("tbody", {}, waits.slice(0, 12).map(([name, rank, other, , seconds, doing]) => h("tr", {}, h("td", {}, String(rank)), h("td", {}, num(seconds, 3)),
      h("td", { className: "text" }, visible(name)), h("td", {}, String(other)), h("td", { className: "text" }, inPhase(doing))))));
}

/** Return how a metric changed at a step: the mean of the ten values before, of three from it on, and the difference in spreads. */
function changeAt(values, at) {
  const earlier = known(values.slice(Math.max(0, at - 10), at)), now = known(values.slice(at, at + 3));
  if (earlier.length < 3 || !now.length) return null;
  const before = mean(earlier), here = mean(now);
  return { before, here, spreads: Math.abs(here - before) / (spreadOf(earlier) + 0.01 * Math.abs(before) + 1e-12) };
}

/** Return the largest change of a metric that lasted, with its step's place `at`; null if there is none. A few odd steps are no change. */
function largestChange(values) {
  const median = (own) => own.sort((a, b) => a - b)[Math.floor(own.length / 2)];
  const size = (change) => Math.abs(change.here - change.before);
  let largest = null;
  for (let at = 3; at + 5 <= values.length; at++) {
    const change = changeAt(values, at);
    if (!change || change.spreads < 3 || (largest && size(change) <= size(largest))) continue;
    const earlier = known(values.slice(Math.max(0, at - 10), at)), later = known(values.slice(at, at + 10));
    if (later.length < 5) continue;
    const lasting = (median(later) - median(earlier)) / (change.here - change.before);
    if (lasting > 0.5) largest = { ...change, at };
  }
  while (largest && largest.at > 3) { // back to where it began
    const earlier = changeAt(values, largest.at - 1);
    if (!earlier || (earlier.here - earlier.before) / (largest.here - largest.before) < 0.8) break;
    largest = { ...earlier, at: largest.at - 1 };
  }
  return largest;
}

/** Return a link for the largest change of each of a run's main metrics; null if none changed. */
function findings(i) {
  const { steps, columns } = training(i);
  const found = ["reward/mean", "perf/step_s"].map((name) => [name, largestChange(columns[name] || [])]).filter(([, change]) => change);
  if (!found.length) return null;
  return h("div", { className: "row findings" }, "Largest changes:", found.map(([name, { before, here, at }]) =>
    h("button", { title: "what changed at this step", onclick: () => change({ tab: "step", run: String(i), step: String(steps[at]) }) },
      `${name} ${here < before ? "fell" : "rose"} from ${num(before, 2)} to ${num(here, 2)} at step ${steps[at]}`)));
}

/** Return the metrics that changed most at a step, against the ten steps before. */
function changes(steps, columns, at) {
  if (at < 3) return h("p", { className: "pale" }, "There are too few earlier steps to compare with.");
  const rows = [];
  for (const [name, values] of Object.entries(columns)) {
    const own = changeAt(values, at);
    if (own) rows.push([name, own.before, own.here, own.spreads]);
  }
  rows.sort((a, b) => b[3] - a[3]);
  return h("div", {}, h("p", { className: "small pale" },
    `Mean of steps ${steps[at]} to ${steps[Math.min(steps.length - 1, at + 2)]} against the ${Math.min(at, 10)} steps before, in units of their spread; largest first.`),
    h("table", {}, h("thead", {}, h("tr", {}, ["metric", "before", "now", "spreads"].map((t) => h("th", {}, t)))),
      h("tbody", {}, rows.slice(0, 12).map(([name, usual, here, times]) => h("tr", { title: meaning(name)[1] },
        h("td", {}, visible(name), h("span", { className: "small pale" }, ` ${meaning(name)[0]}`)), h("td", {}, num(usual)), h("td", {}, num(here)), h("td", {}, num(times, 2)))))));
}

// ------------------------------------------------------------------ rollouts

async function drawRollouts(main) {
  const turn = drawing;
  const i = chosenRun();
  const run = DATA.runs[i];
  if (!run.rollouts.length) {
    main.append(h("div", { className: "row" }, runSelect()), h("p", {}, "No rollouts are on this page. A run with rollout.record.every 1 records those of each step."));
    return;
  }
  const asked = state.step === "" ? run.rollouts[run.rollouts.length - 1] : Number(state.step);
  const step = nearest(run.rollouts, asked);
  const list = h("div", { id: "groups" });
  let chunk = null;
  const again = () => { if (chunk) showGroups(list, chunk); };
  main.append(
    h("div", { className: "row" }, runSelect(), stepControls(run.rollouts, step, [...run.rollouts, ...training(i).steps]),
      choice("color", "color", [["push", "pushed up or down: advantage x (1 - probability)"], ["advantage", "advantage"], ["probability", "probability"], ["ratio", "trainer's probability / engine's"], ["version", "policy version"]], { onchange: again }),
      choice("order", "order", [["group", "group"], ["low", "lowest reward"], ["high", "highest reward"], ["spread", "largest spread"], ["length", "longest"]], { onchange: again })),
    h("div", { className: "row" },
      searchBox("text", "text of prompt or response", { onchange: again }),
      labelled("group", searchBox("group", "number", { type: "number", onchange: again })),
      labelled("data row", searchBox("row", "number", { type: "number", onchange: again })),
      labelled("reward from", searchBox("least", "least", { type: "number", onchange: again })),
      labelled("to", searchBox("most", "largest", { type: "number", onchange: again })),
      choice("only", "only", [["", "all"], ["failed", "failed rewards"], ["truncated", "cut at the limit"], ["mixed", "groups with a spread"]], { onchange: again }),
      h("button", { onclick: () => searchAll(list, i) }, `search all ${run.rollouts.length} steps`)),
    h("p", { className: "small pale", id: "legend" }),
    state.step !== "" && Number(state.step) !== step ? h("p", { className: "note" }, `The rollouts of step ${state.step} are not on the page; these are of step ${step}, the nearest one.`) : "",
    list);
  list.append(h("p", { className: "pale" }, "unpacking ..."));
  const found = await part(`rollouts-${i}-${step}`).catch((error) => error);
  if (turn !== drawing) return;
  if (!found || found instanceof Error) {
    list.replaceChildren(h("p", { className: "note" }, `The rollouts of step ${step} cannot be unpacked.`));
    return;
  }
  chunk = found;
  again();
}

const opened = new Set(); // "step/group" of the groups that are open
const FILTERS = ["text", "group", "row", "least", "most", "only"];
const firstTraces = (group) => group.samples.filter((s) => s.trace === 0 && s.sample >= 0);
const rewardsOf = (group) => known(firstTraces(group).map((s) => s.reward));

function textOf(sample, chunk) {
  if (sample.text !== undefined) return sample.text;
  if (sample.whole === undefined) sample.whole = sample.tokens.map((t) => chunk.vocabulary[t] ?? "").join("");
  return sample.whole;
}

const promptText = (group) => group.prompt.map((p) => (typeof p === "string" ? p : `[${p.label}]`)).join("");

/** Return whether a sample passes the filters. */
function passes(sample, group, chunk) {
  const text = state.text.toLowerCase();
  if (text && !promptText(group).toLowerCase().includes(text) && !textOf(sample, chunk).toLowerCase().includes(text)) return false;
  if (state.group !== "" && group.group !== Number(state.group)) return false;
  if (state.row !== "" && group.row + 1 !== Number(state.row)) return false;
  if (state.least !== "" && !(sample.reward >= Number(state.least) && sample.reward !== null)) return false;
  if (state.most !== "" && !(sample.reward <= Number(state.most) && sample.reward !== null)) return false;
  if (state.only === "failed" && !sample.failure) return false;
  if (state.only === "truncated" && !sample.truncated) return false;
  if (state.only === "mixed" && new Set(rewardsOf(group)).size < 2) return false;
  return true;
}

function spreadOf(values) {
  if (!values.length) return 0;
  const usual = mean(values);
  return Math.sqrt(mean(values.map((v) => (v - usual) ** 2)));
}

function showGroups(list, chunk) {
  const filters = FILTERS.some((name) => state[name] !== "");
  const chosen = chunk.groups.map((group) => [group, group.samples.filter((s) => passes(s, group, chunk))]).filter(([, own]) => own.length);
  const order = { group: ([g]) => g.group, low: ([g]) => mean(rewardsOf(g)) || 0, high: ([g]) => -(mean(rewardsOf(g)) || 0),
    spread: ([g]) => -spreadOf(rewardsOf(g)), length: ([g]) => -Math.max(...g.samples.map((s) => s.length || 0)) }[state.order];
  chosen.sort((a, b) => order(a) - order(b) || a[0].group - b[0].group);
  const count = chosen.reduce((sum, [, own]) => sum + own.length, 0);
  document.getElementById("legend").replaceChildren(legendText(chunk));
  list.replaceChildren(
    ...chunk.notes.map((note) => h("div", { className: "note" }, visible(note))),
    h("p", { className: "small pale" }, `step ${chunk.step}: ${chosen.length} of ${chunk.groups.length} groups` + (filters ? `, ${count} responses pass the filters ` : ""),
      filters ? h("button", { onclick: () => change(Object.fromEntries(FILTERS.map((name) => [name, ""]))) }, "clear the filters") : null));
  const more = (from) => {
    for (const [group, own] of chosen.slice(from, from + MOST_GROUPS)) list.append(groupElement(group, own, chunk));
    if (chosen.length > from + MOST_GROUPS) {
      const button = h("button", { onclick: () => { button.remove(); more(from + MOST_GROUPS); } }, `${chosen.length - from - MOST_GROUPS} more groups`);
      list.append(button);
    }
  };
  more(0);
  if (chosen.length === 1) list.querySelector("details").open = true;
}

function legendText(chunk) {
  return {
    advantage: "Green: the advantage is above 0, red: below; strongest at the largest of the group.",
    push: "Green: the update raises the token's probability, red: it lowers it, strongest where the advantage is large and the token unlikely (the first-order push on its logit).",
    probability: "Orange: unlikely tokens, strongest at a probability of e^-5 or less.",
    ratio: "Green: the trainer found the token more probable than the engine that sampled it, red: less; strongest at a ratio of 1.2 or 1 / 1.2.",
    version: "Blue: tokens that older weights sampled than the newest of the response, stronger for older ones.",
  }[state.color] + " Grey italics: read, not sampled. Point at a token, or go to it with the arrow keys, for its numbers.";
}

function groupElement(group, own, chunk) {
  const rewards = firstTraces(group).map((s) => s.reward);
  const low = Math.min(...known(rewards), 0), high = Math.max(...known(rewards), 1);
  const squares = firstTraces(group).map((s) => h("span", { className: "square", title: `sample ${s.sample}: ${s.reward === null ? "failed" : num(s.reward)}`,
    style: { background: s.reward === null ? "transparent" : `rgba(${css("--up")}, ${(0.9 * (s.reward - low)) / (high - low || 1)})` } }));
  const valid = known(rewards);
  const body = h("div", {});
  const element = h("details", { data: { group: group.group },
    ontoggle: () => {
      opened[element.open ? "add" : "delete"](`${chunk.step}/${group.group}`);
      if (element.open && !body.childNodes.length) fillGroup(body, group, own, chunk);
    } },
    h("summary", {}, `group ${group.group}, data row ${group.row + 1}  `, squares,
      ` mean ${valid.length ? num(mean(valid), 3) : "\u2013"}  `,
      h("span", { className: "pale" }, visible(promptText(group).replace(/\s+/g, " ").slice(0, 110)))), body);
  element.open = opened.has(`${chunk.step}/${group.group}`);
  return element;
}

function fillGroup(body, group, own, chunk) {
  body.append(h("h3", {}, "Prompt"), h("pre", {}, group.prompt.map(pieceOf)));
  const largest = group.samples.reduce((most, s) => s.advantages.reduce((a, [, value]) => Math.max(a, Math.abs(value || 0)), most), 0);
  const episodes = new Map();
  for (const sample of own) episodes.set(sample.sample, [...(episodes.get(sample.sample) || []), sample]);
  for (const [number, traces] of episodes) {
    const all = group.samples.filter((s) => s.sample === number);
    if (all.length > 1) body.append(treeOf(all));
    for (const trace of traces) body.append(responseElement(trace, chunk, largest, all.length > 1));
  }
  if (own.length < group.samples.length) {
    const button = h("button", { onclick: () => { button.remove(); body.replaceChildren(); fillGroup(body, group, group.samples, chunk); } },
      `show all ${group.samples.length} responses of the group`);
    body.append(button);
  }
}

function pieceOf(piece) {
  if (typeof piece === "string") return marked(visible(piece));
  if (!piece.png) return `[${piece.label}]`;
  return h("img", { alt: piece.label, title: piece.label, src: `data:image/png;base64,${piece.png}` });
}

/** Return a text with the searched words marked. */
function marked(text) {
  if (!state.text) return text;
  const parts = [];
  const lower = text.toLowerCase(), word = state.text.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(word); at >= 0 && parts.length < 400; at = lower.indexOf(word, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}

function titleOf(sample, chunk) {
  const words = [sample.sample < 0 ? "greedy" : `sample ${sample.sample}`];
  if (sample.trace) words[0] += `, trace ${sample.trace}`;
  if (sample.parent !== undefined && sample.parent !== null) words.push(`after token ${sample.start} of trace ${sample.parent}`);
  words.push(sample.reward === null ? `reward failed (${visible(sample.failure)})` : `reward ${num(sample.reward)}`);
  if (sample.raw !== null && sample.raw !== sample.reward) words.push(`before shaping ${num(sample.raw)}`);
  if (chunk.part_names.length > 1 && sample.sample >= 0)
    chunk.part_names.forEach((name, k) => words.push(`${visible(name)} ${num(sample.parts[k])}`));
  const values = sample.advantages.map(([, value]) => value);
  if (values.length) {
    const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    words.push(`advantage ${num(low)}${high > low ? ` to ${num(high)}` : ""}`);
  }
  words.push(`${sample.length} tokens${sample.truncated ? ", cut" : ""}`);
  if (sample.turns > 1) words.push(`${sample.turns} turns`);
  return words.join(", ");
}

function responseElement(sample, chunk, largest, inTree) {
  const pre = h("pre", { tabIndex: 0, role: "group", "aria-label": "tokens; arrow keys go from token to token" });
  const element = h("section", { data: { sample: sample.sample, trace: sample.trace } }, h("h3", {}, titleOf(sample, chunk)), pre);
  if (inTree) {
    element.className = "episode";
    element.style.marginLeft = `${2 * (sample.depth || 0)}em`;
  }
  fillTokens(pre, sample, chunk, largest);
  return element;
}

/** Return {is, version, logprob, advantage, ratio} of a sample's tokens; what is not known is null. */
function tokenNumbers(sample) {
  const flat = (runs) => runs.flatMap(([count, value]) => new Array(count).fill(value));
  const sampled = flat(sample.mask), versions = flat(sample.versions), advantages = flat(sample.advantages);
  let at = -1;
  return sampled.map((is, k) => {
    at += is;
    const logprob = is ? sample.logprobs[at] : null, trainer = is ? sample.trainer[at] ?? null : null;
    return { is, version: versions[k], logprob, advantage: is ? advantages[at] ?? null : null,
      ratio: trainer === null || logprob === null ? null : Math.exp(trainer - logprob) };
  });
}

function paint({ logprob, version, advantage, ratio }, newest, oldest, largest) {
  const share = largest ? Math.abs(advantage || 0) / largest : 0;
  const hue = (advantage || 0) < 0 ? "--down" : "--up";
  if (state.color === "advantage") return [hue, Math.sqrt(share)];
  if (state.color === "push") return [hue, Math.sqrt(share * (1 - Math.exp(logprob ?? 0)))]; // the root: small ones can be seen
  if (state.color === "ratio") return [ratio < 1 ? "--down" : "--up", ratio === null ? 0 : Math.abs(Math.log(ratio)) / Math.log(1.2)];
  if (state.color === "version") return ["--version", newest > oldest ? (newest - version) / (newest - oldest) : 0];
  return ["--unlikely", (logprob ?? 0) / -5];
}

function fillTokens(pre, sample, chunk, largest) {
  const hasText = sample.text === undefined;
  const numbers = tokenNumbers(sample);
  const versions = numbers.filter((one) => one.is).map((one) => one.version);
  const newest = versions.reduce((a, b) => Math.max(a, b), -1), oldest = versions.reduce((a, b) => Math.min(a, b), Infinity);
  const covered = new Set(sample.covered);
  const colors = { "--up": css("--up"), "--down": css("--down"), "--unlikely": css("--unlikely"), "--version": css("--version") };
  const spanOf = (token, k) => {
    if (covered.has(k)) return null;
    if (sample.images[k]) return pieceOf(sample.images[k]);
    const raw = hasText ? chunk.vocabulary[token] ?? "" : `${token} `;
    const span = h("span", { data: { k } }, hasText ? visible(raw).replace(/\n/g, "\u21b5\n") || "\u2205" : raw);
    if (!numbers[k].is) span.className = "read";
    else {
      const [hue, strength] = paint(numbers[k], newest, oldest, largest);
      if (strength > 0.01) span.style.background = `rgba(${colors[hue]}, ${(0.6 * Math.min(1, strength)).toFixed(3)})`;
    }
    return span;
  };
  const tell = (span) => {
    const k = Number(span.dataset.k), token = sample.tokens[k], { is, version, logprob, advantage, ratio } = numbers[k];
    pre.querySelector(".at")?.classList.remove("at");
    span.classList.add("at");
    const words = [`token ${sample.start + k}`, `id ${token}`, hasText ? JSON.stringify(visible(chunk.vocabulary[token] ?? "")) : ""];
    if (is) words.push(`probability ${logprob === null ? "\u2013" : percent(Math.exp(logprob))}`, `logprob ${num(logprob)} nats`, `version ${version}`,
      ...(ratio === null ? [] : [`trainer / engine ${num(ratio)}`]),
      ...(advantage === null ? [] : [`advantage ${num(advantage)}`, `advantage x (1 - probability) ${num(advantage * (1 - Math.exp(logprob ?? 0)))}`]));
    else words.push("read, not sampled");
    document.getElementById("token").textContent = words.filter(Boolean).join(",  ");
  };
  pre.addEventListener("mouseover", (e) => { if (e.target.dataset?.k !== undefined) tell(e.target); });
  pre.addEventListener("keydown", (e) => {
    const by = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[e.key];
    if (!by) return;
    e.preventDefault();
    let next = pre.querySelector(".at");
    next = next ? next[by] : pre.querySelector("span[data-k]");
    while (next && next.dataset?.k === undefined) next = next[by];
    if (next) { tell(next); next.scrollIntoView({ block: "nearest" }); }
  });
  const more = (from) => {
    const end = Math.min(sample.tokens.length, from + MOST_TOKENS);
    pre.append(...sample.tokens.slice(from, end).map((token, k) => spanOf(token, from + k)).filter(Boolean));
    if (end < sample.tokens.length) {
      const button = h("button", { onclick: () => { button.remove(); more(end); } }, `${sample.tokens.length - end} more tokens`);
      pre.append(button);
    } else if (sample.left_out > 0) pre.append(h("div", { className: "note" }, `${sample.left_out} more tokens are left out of the page`));
  };
  if (!hasText) pre.before(h("pre", {}, marked(visible(sample.text))));
  more(0);
  if (!sample.tokens.length && sample.left_out <= 0) pre.append(h("span", { className: "pale" }, "nothing was sampled"));
}

/** Return the traces of an episode as a tree: from where each leaves another, what was read and sampled. */
function treeOf(traces) {
  const lengthOf = (t) => t.tokens.length;
  const end = Math.max(...traces.map((t) => t.start + lengthOf(t)), 1);
  const left = 70, width = 760, line = 22;
  const x = (token) => left + (width - left - 10) * (token / end);
  const rows = new Map(traces.map((t, k) => [t.trace, k]));
  const parts = [];
  traces.forEach((trace, k) => {
    const y = 8 + k * line;
    parts.push(svg("text", { x: 0, y: y + 11 }, `trace ${trace.trace}`));
    if (trace.parent !== null && trace.parent !== undefined) {
      const from = 8 + rows.get(trace.parent) * line + 7;
      parts.push(svg("path", { d: `M${x(trace.start)},${from} V${y + 7}`, fill: "none", stroke: css("--pale"), "stroke-width": 1.5 }));
    }
    let at = trace.start;
    for (const [count, is] of trace.mask) {
      const box = svg("rect", { x: x(at), y, width: Math.max(1, x(at + count) - x(at)), height: 14, rx: 2,
        fill: is ? css("--accent") : css("--line"), stroke: css("--pale"), "stroke-width": 0.5 });
      box.append(svg("title", {}, `trace ${trace.trace}: ${count} tokens ${is ? "sampled" : "read"}, from token ${at}`));
      parts.push(box);
      at += count;
    }
  });
  const height = 16 + traces.length * line + 14;
  parts.push(svg("text", { x: left, y: height - 4, class: "pale" }, `blue: sampled, grey: read; ${end} tokens from left to right`));
  return svg("svg", { class: "tree", role: "img", "aria-label": "tree of the episode's traces", width, height, viewBox: `0 0 ${width} ${height}` }, parts);
}

/** List the responses of all steps that pass the filters. */
async function searchAll(list, run) {
  const turn = drawing;
  const found = h("tbody", {});
  const status = h("p", { className: "small pale", role: "status" });
  list.replaceChildren(status, h("table", {}, h("thead", {}, h("tr", {}, ["step", "group", "data row", "sample", "reward", "prompt", "response"].map((t) => h("th", { className: ["prompt", "response"].includes(t) ? "text" : "" }, t)))), found));
  let count = 0, done = 0;
  for (const step of DATA.runs[run].rollouts) {
    const chunk = await part(`rollouts-${run}-${step}`).catch(() => null);
    unpackedParts.delete(`rollouts-${run}-${step}`);
    if (turn !== drawing || !list.contains(status)) return;
    done += 1;
    for (const group of chunk ? chunk.groups : [])
      for (const sample of group.samples) {
        if (sample.trace || !passes(sample, group, chunk)) continue;
        count += 1;
        if (count > 500) continue;
        found.append(h("tr", {}, h("td", {}, h("button", { onclick: () => change({ step: String(step), row: String(group.row + 1) }) }, String(step))),
          h("td", {}, String(group.group)), h("td", {}, String(group.row + 1)), h("td", {}, String(sample.sample)), h("td", {}, num(sample.reward)),
          h("td", { className: "text" }, visible(promptText(group).slice(0, 160))),
          h("td", { className: "text" }, visible(textOf(sample, chunk).slice(0, 160)))));
      }
    status.textContent = `${done} of ${DATA.runs[run].rollouts.length} steps searched, ${count} responses pass` + (count > 500 ? "; the first 500 are listed" : "");
  }
}

// ------------------------------------------------------------------ evaluations

async function drawEvaluations(main) {
  const turn = drawing;
  const shown = shownRuns().filter((i) => DATA.runs[i].evaluations.length);
  if (!shown.length) {
    main.append(h("p", {}, "No evaluation of held-out rows was recorded; evaluate.every_steps switches it on."));
    return;
  }
  main.append(h("p", { className: "small pale" }, "Mean over problems \u00b1 half of its 95% interval. A row belongs to the weights after that many steps."));
  for (const i of shown) main.append(h("h2", {}, dot(i), visible(DATA.runs[i].name)), estimatesTable(DATA.runs[i].evaluations));
  const i = shown.includes(chosenRun()) ? chosenRun() : shown[0];
  const fitted = DATA.runs[i].forecast;
  if (fitted) main.append(h("h2", {}, "Forecast of held-out reward, ", visible(DATA.runs[i].name)), h("div", { className: fitted.curve.length ? "say" : "pale" }, fitted.text));
  if (fitted && fitted.curve.length) main.append(forecastPanel(i, fitted.curve));
  const place = h("div", {});
  main.append(h("h2", {}, "Problem by problem"), h("div", { className: "row" }, runSelect(),
    choice("order", "order2", [["change", "largest fall first"], ["gain", "largest gain first"], ["low", "lowest reward first"], ["index", "by row"]])), place);
  const problems = await part(`problems-${i}`).catch(() => null);
  if (turn !== drawing) return;
  place.append(problems ? problemsTable(problems) : h("p", { className: "note" }, "The problems cannot be unpacked."));
}

/** Draw the evaluations of a run, the curve through them and its interval. */
function forecastPanel(run, curve) {
  const { steps, columns } = DATA.runs[run].tables.evaluation;
  const plot = h("div", { className: "plot" });
  const xs = [...new Set([...steps, ...curve.map(([x]) => x)])].sort((a, b) => a - b);
  const column = (pairs) => { const at = new Map(pairs); return xs.map((x) => at.get(x)); };
  const data = [xs, column(curve.map((p) => [p[0], p[3]])), column(curve.map((p) => [p[0], p[2]])), column(curve.map((p) => [p[0], p[1]])),
    column(steps.map((x, k) => [x, columns["eval/reward"][k]]))];
  const faint = { stroke: runColor(run) + "55", width: 1, spanGaps: true, points: { show: false } };
  const panel = h("div", { className: "chart", style: { maxWidth: "60em" } }, h("h3", {}, "eval/reward by steps: evaluations, fitted curve, 95% interval"), plot);
  whenSeen(panel, () => plots.push(new uPlot({ width: plot.clientWidth || 600, height: 220, legend: { show: false }, axes: axes(),
    scales: { x: { time: false }, y: { range: rangeOf } }, bands: [{ series: [1, 2], fill: runColor(run) + "22" }],
    series: [{}, faint, faint, { ...faint, stroke: runColor(run), width: 1.6 }, { stroke: runColor(run), width: 0, points: { show: true, size: 7, fill: runColor(run) } }] }, data, plot)));
  return panel;
}

function estimatesTable(evaluations) {
  const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.all)))];
  const sources = [...new Set(evaluations.flatMap((one) => Object.keys(one.sources)))];
  const several = sources.length > 1 ? sources : [];
  const cell = (own) => h("td", {}, own ? `${num(own[0], 3)}${own[1] === null ? "" : ` \u00b1${num(own[1], 2)}`}` : "\u2013");
  return h("div", { className: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, "steps"), h("th", {}, "problems"), h("th", {}, "samples"), names.map((name) => h("th", {}, visible(name))), several.map((name) => h("th", {}, `reward of ${visible(name)}`)))),
    h("tbody", {}, evaluations.map((one) => h("tr", {}, h("td", {}, String(one.step)), h("td", {}, one.all.reward ? num(one.all.reward[2]) : ""), h("td", {}, String(one.samples)),
      names.map((name) => cell(one.all[name])), several.map((name) => cell(one.sources[name]?.reward)))))));
}

function problemsTable({ steps, problems }) {
  const rows = Object.entries(problems).map(([index, [source, rewards, lengths, answers]]) => {
    const own = known(rewards);
    return { index: Number(index), source, rewards, lengths, answers, change: own.length ? own[own.length - 1] - own[0] : 0, mean: own.length ? mean(own) : 0 };
  });
  const order = { change: (r) => r.change, gain: (r) => -r.change, low: (r) => r.mean, index: (r) => r.index }[state.order2];
  rows.sort((a, b) => order(a) - order(b) || a.index - b.index);
  const all = rows.flatMap((r) => known(r.rewards));
  const low = all.reduce((a, b) => Math.min(a, b), 0), high = all.reduce((a, b) => Math.max(a, b), 1);
  const body = h("tbody", {});
  const place = h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "row of data.eval"), h("th", { className: "text" }, "source"),
    steps.map((step) => h("th", { className: "cell" }, String(step))), h("th", { className: "text" }, "answers after the last"))), body));
  const more = (from) => {
    for (const one of rows.slice(from, from + MOST_PROBLEMS))
      body.append(h("tr", {}, h("td", {}, String(one.index + 1)), h("td", { className: "text" }, visible(one.source)),
        one.rewards.map((v, k) => h("td", { className: "cell", title: `${num(one.lengths[k])} tokens`, style: { background: v === null ? "" : `rgba(${css("--up")}, ${(0.55 * (v - low)) / (high - low)})` } }, num(v, 3))),
        h("td", { className: "text" }, visible(one.answers.join(", ")))));
    if (rows.length > from + MOST_PROBLEMS) {
      const button = h("button", { onclick: () => { button.remove(); more(from + MOST_PROBLEMS); } }, `${rows.length - from - MOST_PROBLEMS} more problems`);
      place.append(button);
    }
  };
  more(0);
  return place;
}

// ------------------------------------------------------------------ memory

const sum = (causes) => Object.values(causes).reduce((a, b) => a + b, 0);
const bytesText = (bytes) => (bytes >= 2 ** 30 / 10 ? `${num(bytes / 2 ** 30, 3)} GiB` : `${num(bytes / 2 ** 20, 3)} MiB`);

function drawMemory(main) {
  const i = chosenRun();
  const run = DATA.runs[i];
  main.append(h("div", { className: "row" }, runSelect()));
  const columns = training(i).columns;
  const measured = Object.keys(columns).filter((name) => name.startsWith("mem/"));
  main.append(h("h2", {}, "Measured on rank 0"), measured.length ? h("table", {},
    h("thead", {}, h("tr", {}, ["metric", "first, GiB", "largest, GiB", "planned", "meaning"].map((t) => h("th", { className: t === "meaning" ? "text" : "" }, t)))),
    h("tbody", {}, measured.map((name) => { const values = known(columns[name]);
      return h("tr", {}, h("td", {}, name), h("td", {}, num(values[0], 3)), h("td", {}, num(values.reduce((a, b) => Math.max(a, b)), 3)),
        h("td", {}, name === "mem/cuda_gib" && run.plan ? bytesText(sum(run.plan.trainer_bytes)) : "\u2013"), h("td", { className: "text" }, meaning(name)[1])); })))
    : h("p", { className: "pale" }, "No memory was recorded."));
  main.append(h("h2", {}, "Planned for a rank, by cause"));
  if (!run.plan) {
    main.append(h("p", { className: "pale" }, "There is no plan on this page: python -m spmdrl view adds it where the model's config.json is at hand."));
    return;
  }
  for (const [title, causes] of [["trainer", run.plan.trainer_bytes], ["engine", run.plan.engine_bytes], ["host memory of a node", run.plan.host_bytes]]) {
    const total = sum(causes);
    if (!total) continue;
    const entries = Object.entries(causes).filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
    main.append(h("h3", {}, `${title}: ${bytesText(total)}` + (title === "trainer" && run.plan.trainer_moment ? `, at its peak (${run.plan.trainer_moment})` : "")),
      h("div", { className: "stack", style: { width: "60em", maxWidth: "100%" } }, entries.map(([name, bytes], k) => h("div", { title: `${name}: ${bytesText(bytes)}`, style: { width: `${(100 * bytes) / total}%`, background: RUN_COLORS[k % RUN_COLORS.length] } }))),
      h("table", {}, h("tbody", {}, entries.map(([name, bytes], k) => h("tr", {}, h("td", {}, h("span", { className: "dot", style: { background: RUN_COLORS[k % RUN_COLORS.length] } }), name), h("td", {}, bytesText(bytes)), h("td", {}, percent(bytes / total)))))));
  }
  main.append(h("p", { className: "small pale" }, "The plan is for the longest sequences that the settings allow; `python -m spmdrl plan` explains it."));
}

// ------------------------------------------------------------------ settings

function drawSettings(main) {
  const shown = shownRuns();
  main.append(h("div", { className: "row" }, searchBox("settings", "search settings"),
    shown.length > 1 ? tick("only differences between runs", "differs") : tick("only what is not the default", "differs")));
  const values = shown.map((i) => ({ ...DATA.runs[i].config }));
  const names = [...new Set(values.flatMap((own) => Object.keys(own)))];
  const extra = shown.map((i) => DATA.runs[i].environment);
  main.append(settingsTable("Settings", names, values, shown, DATA.defaults));
  main.append(settingsTable("Machine, versions and code", [...new Set(extra.flatMap((own) => Object.keys(own)))], extra, shown, null));
}

function settingsTable(title, names, values, shown, defaults) {
  const words = state.settings.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = names.filter((name) => {
    const own = values.map((one) => one[name]);
    const differs = shown.length > 1 ? own.some((v) => v !== own[0]) : !defaults || own[0] !== defaults[name];
    return (!state.differs || differs) && words.every((word) => name.toLowerCase().includes(word) || own.some((v) => String(v).toLowerCase().includes(word)));
  });
  if (!names.length) return h("p", { className: "pale" }, `${title}: nothing could be read.`);
  return h("section", {}, h("h2", {}, title), h("p", { className: "small pale" }, `${rows.length} of ${names.length}` + (defaults ? "; marked: the runs differ, or the value is not the default" : "")),
    h("div", { className: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "name"), shown.map((i) => h("th", { className: "text" }, dot(i), visible(DATA.runs[i].name))), defaults ? h("th", { className: "text" }, "default") : null)),
      h("tbody", {}, rows.map((name) => { const own = values.map((one) => one[name]);
        const differs = shown.length > 1 ? own.some((v) => v !== own[0]) : defaults && own[0] !== defaults[name];
        return h("tr", { className: differs ? "differs" : "" }, h("td", { className: "key" }, visible(name)), own.map((v) => h("td", { className: "text" }, v === undefined ? "\u2013" : visible(v))),
          defaults ? h("td", { className: "text pale" }, defaults[name] === undefined ? "" : visible(defaults[name])) : null); })))));
}

// ------------------------------------------------------------------ start

const PLACE = `place ${location.pathname}`;

function reloadLater() {
  if (!DATA.reload_s) return;
  setTimeout(() => {
    const active = document.activeElement;
    const isTyping = active && ["INPUT", "SELECT"].includes(active.tagName);
    if (document.hidden || isTyping || String(getSelection())) reloadLater();
    else {
      try { sessionStorage.setItem(PLACE, JSON.stringify({ y: scrollY, open: [...opened] })); } catch { /* a browser without storage */ }
      location.reload();
    }
  }, 1000 * DATA.reload_s);
}

/** Return where the page was before it loaded itself again. */
function placeBefore() {
  try {
    const place = JSON.parse(sessionStorage.getItem(PLACE) || "null");
    sessionStorage.removeItem(PLACE);
    return place;
  } catch {
    return null; // a browser without storage
  }
}

async function start() {
  readState();
  try {
    DATA = await part("main");
  } catch (error) {
    document.getElementById("page").append(h("p", { className: "note" }, "The data of this page cannot be unpacked: it was cut off, or this browser is too old (DecompressionStream)."));
    return;
  }
  const place = placeBefore();
  for (const group of place ? place.open : []) opened.add(group);
  draw();
  await drawn;
  if (place) setTimeout(() => scrollTo(0, place.y), 50);
  reloadLater();
  document.body.dataset.ready = "1";
}

addEventListener("hashchange", () => { readState(); draw(); });
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(draw, 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
start();
