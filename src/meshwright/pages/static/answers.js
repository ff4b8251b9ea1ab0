// What the chat page and the arena share: a server's models and their answers, and texts that are copied.
"use strict";
const $ = (id) => document.getElementById(id);
let running = null; // what stops the answer that is being written

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "status " + response.status;
  }
}

// The server's models; null, after `say` has said why, if it gives none.
async function servedModels(say) {
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  if (!response) return say("the server does not answer"), null;
  $("keylabel").hidden = response.status !== 401 && !$("key").value;
  if (!response.ok) return say(await failure(response)), null;
  return (await response.json()).data;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// The model's answer to the last of `messages`, as it grows: "" once the server answers, then all text so far.
async function* answers(model, messages, signal) {
  const common = { model: model.id, stream: true, temperature: Number($("temperature").value), max_tokens: Number($("tokens").value) };
  const body = model.chat ? { ...common, messages } : { ...common, prompt: messages.at(-1).content };
  const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal };
  const response = await fetch(model.chat ? "v1/chat/completions" : "v1/completions", options);
  if (!response.ok) throw new Error(await failure(response));
  let said = "";
  yield said;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) said += (model.chat ? choice.delta.content : choice.text) || "";
    yield said;
  }
}

// Enter sends, Shift+Enter breaks the line.
function sendsWithEnter(field) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || running) return;
    event.preventDefault();
    field.form.requestSubmit();
  });
}

// Pictures have no place in what these models read.
function refuseImages(field, say) {
  const refuse = (event) => {
    const files = [...((event.clipboardData ?? event.dataTransfer)?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    const image = files.some((file) => file.type.startsWith("image/"));
    say(image ? "Images cannot be sent: the models here read text alone. Describe the picture in words." : "Files cannot be sent: paste their text instead.");
  };
  field.addEventListener("paste", refuse);
  for (const kind of ["dragover", "drop"])
    document.addEventListener(kind, (event) => (kind === "drop" ? refuse(event) : event.dataTransfer?.types.includes("Files") && event.preventDefault()));
}

async function copyText(button, text) {
  const named = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not copied";
  }
  setTimeout(() => (button.textContent = named), 1500);
}
document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".copy-code");
  if (button) copyText(button, button.dataset.copy);
});
