// The arena: two models without names answer the same messages, and a person votes.
"use strict";
let models = [], sides = [];

const note = (text) => ($("note").textContent = text);
const ballots = (open) => document.querySelectorAll("#votes button").forEach((button) => (button.disabled = !open));

function show(side, kind) {
  const box = document.createElement("div"), body = document.createElement("div");
  box.className = "message " + kind;
  body.className = "body";
  box.append(body);
  $(side).append(box);
  $(side).scrollTop = $(side).scrollHeight;
  return body;
}

async function load() {
  const served = await servedModels(note);
  if (!served) return;
  models = served;
  round();
}

function round() {
  running?.abort();
  ballots(false);
  $("send").disabled = models.length < 2;
  for (const side of ["a", "b"]) $(side).replaceChildren(Object.assign(document.createElement("h2"), { textContent: "Model " + side.toUpperCase() }));
  if (models.length < 2) return note("An arena needs two models; this server has " + models.length + ".");
  const order = [...models];
  for (let i = order.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  sides = ["a", "b"].map((side, i) => ({ side, model: order[i], turns: [] }));
  note("Two models answer. Their names appear after your vote.");
}

async function answer({ side, model, turns }, text, signal) {
  show(side, "user").textContent = text;
  const asked = [...turns, { role: "user", content: text }];
  let said = "", body = null;
  for await (said of answers(model, asked, signal)) {
    body ??= show(side, "assistant");
    body.replaceChildren(...markdown(said));
    $(side).scrollTop = $(side).scrollHeight;
  }
  return [...asked, { role: "assistant", content: said }];
}

async function ask(text) {
  const controller = (running = new AbortController());
  ballots(false);
  $("send").disabled = true;
  try {
    const done = await Promise.all(sides.map((one) => answer(one, text, controller.signal)));
    sides.forEach((one, i) => (one.turns = done[i]));
    ballots(true);
    note("Which answer is better? You may also ask further.");
  } catch (error) {
    controller.abort();
    if (error.name !== "AbortError") note(error.message);
  }
  if (running === controller) {
    running = null;
    $("send").disabled = false;
  }
}

async function vote(winner) {
  ballots(false);
  const [a, b] = sides;
  const told = { model_a: a.model.id, model_b: b.model.id, winner, conversation_a: a.turns, conversation_b: b.turns };
  const response = await fetch("arena/votes", { method: "POST", headers: headers(), body: JSON.stringify(told) });
  if (!response.ok) {
    note(await failure(response));
    return ballots(true);
  }
  for (const one of sides) $(one.side).firstChild.textContent = "Model " + one.side.toUpperCase() + ": " + one.model.id;
  $("send").disabled = true;
  note("Thank you. A was " + a.model.id + ", B was " + b.model.id + ".");
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || $("send").disabled) return;
  $("text").value = "";
  ask(text);
});
sendsWithEnter($("text"));
refuseImages($("text"), note);
$("votes").addEventListener("click", (event) => event.target.dataset.winner && vote(event.target.dataset.winner));
$("again").addEventListener("click", round);
$("key").addEventListener("change", load);
load();
