// The parts of the page beside its charts: tiles, the table of runs, bars, samples, recipes, events, machines.
"use strict";
const SPENT_COLOURS = { training: 0, evaluation: 1, tasks: 3, samples: 4, checkpoints: 2, "first step": 5, "repeated later": 6, other: 7 };
const last = (column) => column?.findLast((value) => value !== null && value !== undefined);
const formatted = (format, value) => (value === null || value === undefined ? null : format(value));
const colourOf = (run) => `var(--c${run.index % COLOURS})`;
const unique = (values) => [...new Set(values)];
const group = (title, ...content) => node("div", {}, node("h2", { class: "group" }, title), ...content);
const card = (id, ...content) => node("section", { class: "card", id }, ...content);

// A table; a cell is a text, an element, or attributes and content.
function tableOf(head, rows) {
  const cell = (one) => (Array.isArray(one) ? node("td", ...one) : node("td", {}, one ?? ""));
  const top = node("thead", {}, node("tr", {}, ...head.map((name) => node("th", {}, name))));
  const body = node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map(cell))));
  return node("div", { class: "scroll" }, node("table", {}, top, body));
}

const FACTS = [
  ["Step", (run) => formatted(FORMATS.step, last(run.tables.step?.step))],
  ["Loss", (run) => formatted(number, last(run.tables.step?.loss))],
  ["Held-out loss", (run) => formatted(number, last(run.tables.evaluation?.loss))],
  ["Tokens", (run) => formatted(FORMATS.tokens, last(run.tables.step?.tokens))],
  ["Tokens per second", (run) => formatted(FORMATS.rate, last(run.tables.step?.tokens_per_s))],
  ["MFU", (run) => formatted(FORMATS.share, last(run.tables.step?.mfu))],
  ["Peak memory", (run) => formatted(FORMATS.bytes, last(run.tables.step?.mem))],
  ["Run time", (run) => clock(run.elapsed)],
  ["Time left", timeLeft],
];

function timeLeft(run) {
  const { step, step_time: times } = run.tables.step ?? {};
  return run.state === "running" && run.steps && last(times) ? clock((run.steps - last(step)) * last(times)) : null;
}

// The newest figures: tiles of one run, a table of several.
function summary(runs) {
  const used = FACTS.filter(([, of]) => runs.some((run) => of(run) !== null));
  if (runs.length > 1) {
    const state = (run) => node("span", { class: `state-${run.state.split(" ")[0]}` }, run.state);
    const mark = (run) => node("i", { class: "swatch", style: { "--of": colourOf(run) } });
    const rows = runs.map((run) => [
      [{}, mark(run), run.name],
      [{ class: "n" }, state(run)],
      ...used.map(([, of]) => [{ class: "n" }, of(run) ?? ""]),
    ]);
    const table = tableOf(["Run", "State", ...used.map(([name]) => name)], rows);
    return node("section", { class: "card runs-table", id: "summary" }, table);
  }
  const [run] = runs,
    of = (name) => (name === "Step" && run.steps && run.steps !== last(run.tables.step?.step) ? ` of ${FORMATS.step(run.steps)}` : "");
  const tile = ([name, figure]) => node("div", { class: "tile" }, node("span", {}, name), node("b", {}, figure(run)), node("small", {}, of(name)));
  return node("div", { class: "tiles", id: "summary" }, ...used.filter(([, figure]) => figure(run) !== null).map(tile));
}

// Stacked bars of memory and time: what was measured beside what was planned.
function bars(runs) {
  const who = (run) => (runs.length > 1 ? `${run.name}, ` : "");
  const time = runs.flatMap((run) => stepBars(run, who(run))),
    memory = runs.flatMap((run) => memoryBars(run, who(run)));
  const spent = runs
    .filter((run) => Object.keys(run.spent).length)
    .map((run) => ({ name: runs.length > 1 ? run.name : "All processes", parts: run.spent }));
  const cards = [
    time.length &&
      barCard("Step time by cause", "Measured: the median of the last 20 steps. Planned: for this layout on these devices.", time, FORMATS.seconds),
    memory.length &&
      barCard(
        "Memory of a rank by kind",
        "Planned for this layout; measured as a whole, and by kind if a memory timeline was recorded.",
        memory,
        FORMATS.bytes,
      ),
    spent.length &&
      barCard("Where the time went", "Steps that a restart or a rewind went back before are counted apart.", spent, clock, SPENT_COLOURS),
  ].filter(Boolean);
  return cards.length ? group("By cause and kind", node("div", { class: "two" }, ...cards)) : null;
}

function stepBars(run, who) {
  const steps = run.tables.step ?? {},
    whole = last(steps.step_time),
    data = last(steps.data_time) ?? 0;
  if (!whole) return [];
  const parts = data ? { "waiting for data": data, "computing, communicating": whole - data } : { "whole step": whole };
  const planned = run.planned?.step_parts;
  return [{ name: `${who}measured`, parts }, ...(planned ? [{ name: `${who}planned`, parts: planned }] : [])];
}

function memoryBars(run, who) {
  const peak = last(run.tables.step?.mem),
    kinds = run.planned?.memory_kinds,
    found = [];
  if (run.memory) found.push({ name: `${who}tensors of step ${run.memory.step}, measured`, parts: run.memory.kinds });
  if (kinds && peak) found.push({ name: `${who}measured peak`, parts: { "whole peak": peak } }, { name: `${who}planned`, parts: kinds });
  return found;
}

const total = (parts) => Object.values(parts).reduce((sum, one) => sum + Math.max(0, one), 0);

function barCard(title, about, rows, format, given = null) {
  const kinds = unique(rows.flatMap((row) => Object.keys(row.parts).filter((kind) => row.parts[kind] > 0)));
  const most = Math.max(...rows.map((row) => total(row.parts)));
  const colour = (kind) => `var(--c${given ? (given[kind] ?? 7) : kinds.indexOf(kind) % COLOURS})`;
  const part = (row, kind) => {
    const text = `${kind}: ${format(row.parts[kind])}, ${trim((100 * row.parts[kind]) / total(row.parts))} %`;
    return node("span", { style: { width: `${(100 * row.parts[kind]) / most}%`, "--of": colour(kind) }, dataset: { tip: text } });
  };
  const bar = (row) =>
    node(
      "div",
      {},
      node("div", { class: "bar-name" }, node("span", {}, row.name), node("b", {}, format(total(row.parts)))),
      node("div", { class: "bar" }, ...kinds.filter((kind) => row.parts[kind] > 0).map((kind) => part(row, kind))),
    );
  const legend = kinds.map((kind) => node("li", {}, node("i", { style: { "--of": colour(kind) } }), kind));
  return card(
    null,
    node("h2", {}, title),
    node("p", { class: "about" }, about),
    node("ul", { class: "legend" }, ...legend),
    node("div", { class: "bars" }, ...rows.map(bar)),
  );
}

function samples(runs, board) {
  const steps = unique(runs.flatMap((run) => run.samples.map((sample) => sample.step))).sort((a, b) => a - b);
  if (!steps.length) return null;
  const place = node("div"),
    label = node("output"),
    several = board.runs.length > 1;
  const prompts = unique(runs.flatMap((run) => run.samples.map((sample) => sample.prompt)));
  const text = (run, prompt, step) => {
    const sample = run.samples.findLast((one) => one.prompt === prompt && one.step <= step);
    if (!sample) return [];
    const who = several ? node("div", { class: "who" }, `${run.name}${sample.step === step ? "" : `, step ${sample.step}`}`) : null;
    return [node("div", {}, who, node("pre", { style: { "--of": several ? colourOf(run) : "var(--line)" } }, node("b", {}, prompt), sample.text))];
  };
  const show = (index) => {
    board.state.sample = index === steps.length - 1 ? null : index;
    label.textContent = `after step ${FORMATS.step(steps[index])}`;
    const one = (prompt) =>
      node("div", { class: "sample" }, node("div", { class: "text" }, ...runs.flatMap((run) => text(run, prompt, steps[index]))));
    place.replaceChildren(...prompts.map(one));
  };
  const chosen = Math.min(board.state.sample ?? steps.length - 1, steps.length - 1);
  const slider = node("input", {
    type: "range",
    id: "sample-step",
    min: 0,
    max: steps.length - 1,
    step: 1,
    value: chosen,
    "aria-label": "Step of the samples",
    oninput: (event) => show(+event.target.value),
  });
  show(chosen);
  return group("Samples", card("samples", node("div", { class: "samples-head" }, steps.length > 1 ? slider : null, label), place));
}

const valueText = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

// The recipe of one run; of several, the settings that differ. All settings, resolved, are folded away.
function recipes(runs, differing) {
  const all = unique(runs.flatMap((run) => Object.keys(run.settings)));
  if (!all.length) return null;
  const several = runs.length > 1;
  const value = (run, name) => [{ class: "value", title: run.reasons[name] ?? null }, valueText(run.settings[name])];
  const table = (names) =>
    tableOf(
      ["Setting", ...(several ? runs.map((run) => run.name) : ["Value"])],
      names.map((name) => [[{ class: "name" }, name], ...runs.map((run) => value(run, name))]),
    );
  const names = differing.map(([name]) => name);
  const first = several
    ? names.length
      ? table(names)
      : node("p", { class: "about" }, "The recipes are equal.")
    : node("pre", {}, runs[0].given.trim());
  const rest = node("details", {}, node("summary", {}, `All ${all.length} settings, resolved`), table(all));
  return group(several ? "Differences between the recipes" : "Recipe", card("recipes", first, rest));
}

function events(runs) {
  const several = runs.length > 1,
    all = runs.flatMap((run) => run.events.map((event) => ({ ...event, run })));
  if (!all.length) return null;
  const kind = (event) => node("span", { class: `kind ${event.kind}` }, event.kind);
  const row = (event) => [
    ...(several ? [event.run.name] : []),
    [{ class: "n" }, FORMATS.step(event.step)],
    [{ class: "n" }, clock(event.time)],
    kind(event),
    [{ class: "value" }, event.text],
  ];
  const table = tableOf([...(several ? ["Run"] : []), "Step", "Time", "Event", ""], all.map(row));
  const folded = () => node("details", {}, node("summary", {}, `${all.length} events`), table);
  return group("Events", card("events", all.length > 12 ? folded() : table));
}

function environments(runs) {
  const flat = (value, prefix) =>
    value && typeof value === "object" && !Array.isArray(value)
      ? Object.entries(value).flatMap(([name, part]) => flat(part, prefix ? `${prefix}.${name}` : name))
      : [[prefix, value]];
  const facts = runs.map((run) => Object.fromEntries(flat(run.environment, "").filter(([name]) => name && !name.startsWith("planned"))));
  const names = unique(facts.flatMap(Object.keys));
  if (!names.length) return null;
  const rows = names.map((name) => [[{ class: "name" }, name], ...facts.map((one) => [{ class: "value" }, valueText(one[name])])]);
  const table = tableOf(["", ...runs.map((run) => run.name)], rows);
  return group("Machine and software", card("environment", node("details", {}, node("summary", {}, `${names.length} facts`), table)));
}
