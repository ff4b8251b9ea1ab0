// The planner's page: a form, its state in the address, and the plan that a worker or the server answers.
"use strict";
const offered = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("ask"),
  fields = form.elements,
  plan = document.getElementById("plan");
const field = (name) => fields.namedItem(name);
const state = { model: "", cluster: "", beside: "", sequence: null, batch: null, precision: "", margin: offered.margin, consider: "", more: "", methods: false, files: {} };
let shown = {}; // what the newest plan has where the form gives nothing

// ---- the answer: from a worker of this page, or from the server that sent it
class Tab {
  constructor(report) {
    this.report = report;
    this.start();
  }
  start() {
    this.waiting = null;
    this.worker = new Worker("planner-worker.js", { type: "module" });
    this.worker.onmessage = ({ data }) => {
      if (data.progress) return this.report(...data.progress);
      const settle = this.waiting;
      this.waiting = null;
      if (settle) data.failed ? settle.reject(new Error(data.failed)) : settle.resolve(data.answer);
    };
    this.worker.onerror = (event) => this.waiting?.reject(new Error(event.message || "the planner could not be started"));
  }
  ask(request) {
    return new Promise((resolve, reject) => {
      this.waiting = { resolve, reject };
      this.worker.postMessage(request);
    });
  }
}
class Server {
  constructor(report) {
    this.report = report;
  }
  async ask(request) {
    this.report(0.1, "planning");
    const answer = await fetch("plan", { method: "POST", headers: { "content-type": "application/json" }, body: request });
    if (!answer.ok && answer.status !== 422) throw new Error(await answer.text());
    return answer.text();
  }
}

// ---- the address holds the state
const KEPT = ["model", "cluster", "beside", "sequence", "batch", "precision", "margin", "consider", "more", "methods"];
const plain = { margin: offered.margin, methods: false };
async function squeeze(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
async function packed(files) {
  const bytes = await squeeze(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(files)));
  return btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join("")).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
  return JSON.parse(new TextDecoder().decode(await squeeze(new DecompressionStream("deflate-raw"), bytes)));
}
async function keep() {
  const kept = new URLSearchParams();
  for (const name of KEPT) if (state[name] && state[name] !== plain[name]) kept.set(name, state[name] === true ? 1 : state[name]);
  if (Object.keys(state.files).length) kept.set("files", await packed(state.files));
  history.replaceState(null, "", `#${kept}`);
}
async function restore() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const name of KEPT) {
    const text = kept.get(name);
    if (name === "methods") state.methods = text === "1";
    else if (name === "sequence" || name === "batch") state[name] = /^\d+$/.test(text ?? "") ? +text : null;
    else if (name === "margin") state.margin = text !== null && +text >= 0 && +text < 1 ? +text : offered.margin;
    else state[name] = text ?? offered.start[name] ?? "";
  }
  try {
    state.files = kept.has("files") ? await unpacked(kept.get("files")) : {};
  } catch {
    state.files = {};
  }
}

// ---- the form shows the state
const CLUSTER = /^(?:(\d+)\s*x\s*)?([^@]+?)(?:@(\d+(?:\.\d+)?)Gb\/s)?$/i;
function option(value, text = value) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  return made;
}
function power(name, value) {
  field(name).value = Math.round(Math.log2(value));
  form.querySelector(`output[for=${name}]`).value = value.toLocaleString("en");
}
function show() {
  for (const name of ["model", "beside", "precision", "consider", "more"]) field(name).value = state[name];
  field("methods").checked = state.methods;
  field("margin").value = state.margin;
  form.querySelector("output[for=margin]").value = `${Math.round(100 * state.margin)} %`;
  const [, count = "1", device = "", rate = ""] = CLUSTER.exec(state.cluster) ?? [null, "1", state.cluster];
  if (![...field("device").options].some((one) => one.value === device)) field("device").append(option(device));
  field("device").value = device;
  power("count", +count);
  field("network").value = rate;
  for (const name of ["sequence", "batch"]) {
    power(name, state[name] ?? shown[name] ?? (name === "batch" ? 64 : 1024));
    form.querySelector(`output[for=${name}]`).classList.toggle("given", state[name] === null);
    form.querySelector(`[data-of=${name}]`).hidden = state[name] === null;
  }
  field("precision").options[0].textContent = shown.precision ? `as the recipe: ${shown.precision}` : "as the recipe";
  const names = Object.keys(state.files);
  field("model").disabled = false;
  document.getElementById("files").replaceChildren(
    ...names.map((name) => {
      const remove = document.createElement("button");
      remove.type = "button";
      remove.textContent = `${name} ×`;
      remove.onclick = () => {
        delete state.files[name];
        change();
      };
      return remove;
    }),
  );
  document.getElementById("command").textContent = command();
}
function read(event) {
  const name = event.target.name;
  if (name === "count" || name === "device" || name === "network") {
    const rate = /^\d+(\.\d+)?$/.test(field("network").value.trim()) ? `@${field("network").value.trim()}Gb/s` : "";
    const old = +(CLUSTER.exec(state.cluster)?.[1] ?? 1);
    const count = name === "count" ? 2 ** +field("count").value : old;
    state.cluster = `${count}x${field("device").value}${rate}`;
  } else if (name === "sequence" || name === "batch") state[name] = 2 ** +field(name).value;
  else if (name === "margin") state.margin = +field("margin").value;
  else if (name === "methods") state.methods = field("methods").checked;
  else if (name in state) state[name] = field(name).value.trim();
  else return;
  change();
}

// ---- a request
function words() {
  const found = [];
  if (state.sequence) found.push(`data.sequence_length=${state.sequence}`);
  if (state.batch) found.push(`training.global_batch=${state.batch}`);
  if (state.precision) found.push(`training.precision=${state.precision}`);
  return [...found, ...(state.more.match(/(?:[^\s{[]|\{[^}]*\}|\[[^\]]*\])+/g) ?? [])];
}
function clusters() {
  return [state.cluster, ...state.beside.split(",")].map((one) => one.trim()).filter(Boolean);
}
function request() {
  const { model, files, margin, consider, methods } = state;
  return JSON.stringify({ model, files, margin, consider, methods, words: words(), clusters: clusters() });
}
const quoted = (word) => (/^[\w.=@:,/+-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`);
function command() {
  const names = Object.keys(state.files);
  const what = !names.length ? [state.model] : names.length === 1 && names[0] !== "config.json" ? names : ["run.yaml"];
  const options = clusters().flatMap((one) => ["--cluster", one]);
  if (state.margin !== offered.margin) options.push("--margin", String(state.margin));
  if (state.consider) options.push("--consider", state.consider);
  if (!state.methods) options.push("--no-methods");
  return ["meshwright", "plan", ...what, ...words(), ...options].map(quoted).join(" ");
}

// ---- asking: one request at a time, and after it the newest
const bar = document.getElementById("progress");
function report(share, what) {
  bar.hidden = false;
  bar.querySelector("i").style.width = `${100 * share}%`;
  bar.querySelector("span").textContent = what;
}
const backend = new (offered.mode === "tab" ? Tab : Server)(report);
let running = false,
  next = null;
async function ask() {
  next = request();
  if (running) return;
  running = true;
  plan.classList.add("old");
  while (next !== null) {
    const text = next;
    next = null;
    report(0.02, "planning");
    try {
      const answer = JSON.parse(await backend.ask(text));
      if (next === null) draw(answer);
    } catch (error) {
      draw({ problems: [error.message] });
    }
  }
  bar.hidden = true;
  running = false;
}
function paragraphs(lines) {
  return lines.map((line) => {
    const made = document.createElement("p");
    made.textContent = line;
    return made;
  });
}
function draw(answer) {
  const problems = document.getElementById("problems");
  problems.hidden = !answer.problems;
  problems.replaceChildren(...paragraphs(answer.problems ?? []));
  if (answer.problems) return;
  plan.classList.remove("old");
  shown = answer;
  // The planner escapes every text in it, as in the page that `plan --html` writes.
  plan.innerHTML = answer.body;
  if (answer.notes.length) {
    const card = document.createElement("section");
    card.className = "card notes";
    card.append(...paragraphs(answer.notes));
    plan.prepend(card);
  }
  document.querySelector("h1").textContent = answer.title;
  document.title = `${answer.title} - plan`;
  document.getElementById("about").textContent = new DOMParser().parseFromString(answer.about, "text/html").body.textContent;
  show();
}
let timer = 0;
function change() {
  show();
  keep();
  clearTimeout(timer);
  timer = setTimeout(ask, 120);
}

// ---- files
async function take(files) {
  for (const file of files) state.files[file.name] = await file.text();
  change();
}
const drop = document.getElementById("drop");
for (const kind of ["dragover", "drop", "dragleave"])
  document.addEventListener(kind, (event) => {
    if (kind !== "dragleave") event.preventDefault();
    drop.classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
document.getElementById("pick").addEventListener("change", (event) => take(event.target.files));

form.addEventListener("input", (event) => {
  if (event.target.type === "range") read(event);
});
form.addEventListener("change", read);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("click", (event) => {
  const name = event.target.dataset?.of;
  if (!name) return;
  state[name] = null;
  change();
});
document.getElementById("share").addEventListener("click", async (event) => {
  try {
    await navigator.clipboard.writeText(location.href);
    event.target.textContent = "Copied";
  } catch {
    event.target.textContent = "Copy it from the address bar";
  }
  setTimeout(() => (event.target.textContent = "Copy link"), 1500);
});
addEventListener("hashchange", async () => {
  await restore();
  show();
  ask();
});

(async () => {
  document.getElementById("models").append(...offered.models.map((name) => option(name)));
  field("device").append(...offered.devices.map((name) => option(name)));
  field("precision").append(option("", "as the recipe"), ...offered.precisions.map((name) => option(name)));
  field("consider").append(option("", "none"), ...offered.changes.map((name) => option(name)));
  await restore();
  show();
  if (offered.mode === "tab" && location.protocol === "file:")
    draw({ problems: ["A browser starts no worker for a page in a file: run python -m http.server in this folder, and open the address that it prints."] });
  else ask();
})();
