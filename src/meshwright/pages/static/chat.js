// The chat page. A turn keeps every answer that the model gave; `at` is the one shown and sent.
"use strict";
const KEPT = "meshwright-conversations", MOST = 100, NARROW = matchMedia("(max-width: 800px)");
let models = {}, talk = fresh(), editing = -1;

function fresh() {
  return { id: crypto.randomUUID?.() ?? String(Date.now() + Math.random()), changed: 0, turns: [] };
}

const shown = (turn) => turn.texts[turn.at];
const note = (text) => ($("note").textContent = text);
const button = (text, call) => Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: call });
const box = (kind, ...children) => {
  const made = document.createElement("div");
  made.className = kind;
  made.append(...children);
  return made;
};

function keptTalks() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => one?.id && Array.isArray(one.turns)) : [];
  } catch {
    return [];
  }
}

// Keep these conversations, the newest first; the oldest go when there is no room.
function keep(talks) {
  talks = talks.slice(0, MOST);
  for (; ; talks.pop()) {
    try {
      localStorage.setItem(KEPT, JSON.stringify(talks));
      return list();
    } catch {
      if (!talks.length) return note("This browser keeps no conversations.");
    }
  }
}

function keepTalk() {
  talk.changed = Date.now();
  Object.assign(talk, { model: $("model").value, system: $("system").value });
  keep([talk, ...keptTalks().filter((one) => one.id !== talk.id)]);
}

function list() {
  $("kept").replaceChildren(
    ...keptTalks().map((one) => {
      const open = button((one.turns[0] ? shown(one.turns[0]) : "").slice(0, 80), () => openTalk(one));
      const remove = button("×", () => {
        if (one.id === talk.id) newTalk();
        keep(keptTalks().filter((other) => other.id !== one.id));
      });
      open.classList.toggle("on", one.id === talk.id);
      open.title = new Date(one.changed).toLocaleString();
      remove.setAttribute("aria-label", "Delete this conversation");
      const row = document.createElement("li");
      row.append(open, remove);
      return row;
    }),
  );
}

function openTalk(one) {
  running?.abort();
  talk = one;
  editing = -1;
  if (models[one.model]) $("model").value = one.model;
  $("system").value = one.system ?? "";
  if (NARROW.matches) $("talks").open = false;
  describe();
  draw();
  list();
}

function newTalk() {
  running?.abort();
  talk = fresh();
  editing = -1;
  draw();
  list();
}

function describe() {
  const model = models[$("model").value];
  $("source").textContent = model ? model.source + (model.chat ? "" : ". Without a chat template it continues what you write.") : "";
  $("about").textContent = model ? model.id : "";
}

function draw() {
  $("log").replaceChildren(...talk.turns.map(message));
  if (!talk.turns.length) $("log").append(box("empty", "Write a message to begin."));
  $("log").scrollTop = $("log").scrollHeight;
}

function message(turn, number) {
  const made = box(`message ${turn.role}`), body = box("body"), tools = box("tools");
  if (editing === number) return editor(turn, number);
  if (turn.role === "assistant") body.append(...markdown(shown(turn)));
  else body.textContent = shown(turn);
  if (turn.texts.length > 1) {
    const to = (by) => () => ((turn.at += by), keepTalk(), draw());
    const [back, on] = [button("‹", to(-1)), button("›", to(1))];
    Object.assign(back, { disabled: turn.at === 0, ariaLabel: "Earlier answer" });
    Object.assign(on, { disabled: turn.at === turn.texts.length - 1, ariaLabel: "Later answer" });
    tools.append(back, `${turn.at + 1} of ${turn.texts.length}`, on);
  }
  tools.append(button("Copy", (event) => copyText(event.target, shown(turn))));
  if (turn.role === "user") tools.append(button("Edit", () => running || ((editing = number), draw(), document.querySelector(".editor textarea").focus())));
  else if (number === talk.turns.length - 1) tools.append(button("Regenerate", () => running || answer()));
  made.append(body, tools);
  return made;
}

function editor(turn, number) {
  const form = document.createElement("form"), field = document.createElement("textarea");
  form.className = "message user editor";
  Object.assign(field, { value: shown(turn), rows: 3, ariaLabel: "Message" });
  const send = Object.assign(document.createElement("button"), { textContent: "Send", className: "strong" });
  form.append(field, box("tools", button("Cancel", () => ((editing = -1), draw())), send, number < talk.turns.length - 2 ? "replaces all that follows" : ""));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !field.value.trim()) return;
    talk.turns.length = number;
    say(field.value);
  });
  sendsWithEnter(field);
  return form;
}

function say(text) {
  editing = -1;
  talk.turns.push({ role: "user", texts: [text], at: 0 });
  keepTalk();
  answer();
}

// Answer the newest message; another answer to it, if there is one already.
async function answer() {
  const model = models[$("model").value], here = talk, last = talk.turns.at(-1);
  if (!model) return note("There is no model to answer.");
  const again = last.role === "assistant" ? last : null, asked = again ? talk.turns.slice(0, -1) : talk.turns;
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  const messages = [...system, ...asked.map((turn) => ({ role: turn.role, content: shown(turn) }))];
  running = new AbortController();
  const own = running;
  $("send").textContent = "Stop";
  note("");
  draw();
  const body = box("body"), made = box("message assistant", body);
  let said = "", drawn = 0;
  try {
    for await (said of answers(model, messages, own.signal)) {
      if (here !== talk) continue;
      if (!made.parentNode) again ? $("log").lastChild.replaceWith(made) : $("log").append(made);
      drawn ||= requestAnimationFrame(() => {
        const low = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 60;
        body.replaceChildren(...markdown(said));
        if (low) $("log").scrollTop = $("log").scrollHeight;
        drawn = 0;
      });
    }
  } catch (error) {
    if (error.name !== "AbortError") note(error.message);
  }
  cancelAnimationFrame(drawn);
  if (said && again) again.at = again.texts.push(said) - 1;
  else if (said) here.turns.push({ role: "assistant", texts: [said], at: 0 });
  if (running === own) {
    running = null;
    $("send").textContent = "Send";
  }
  if (here !== talk) return said && keep(keptTalks().map((one) => (one.id === here.id ? here : one)));
  if (said) keepTalk();
  draw();
}

async function load() {
  const served = await servedModels(note);
  if (!served) return;
  models = Object.fromEntries(served.map((model) => [model.id, model]));
  $("model").replaceChildren(...served.map((model) => new Option(model.id)));
  describe();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("text").value;
  if (!text.trim()) return;
  if (!models[$("model").value]) return note("There is no model to answer.");
  $("text").value = "";
  if (talk.turns.at(-1)?.role === "user") talk.turns.pop(); // it had no answer
  say(text);
});
sendsWithEnter($("text"));
refuseImages($("text"), note);
$("clear").addEventListener("click", () => (newTalk(), $("text").focus()));
$("model").addEventListener("change", describe);
$("key").addEventListener("change", load);
for (const part of [$("talks"), $("settings")]) part.open = !NARROW.matches;
list();
draw();
load();
if (!NARROW.matches) $("text").focus();
