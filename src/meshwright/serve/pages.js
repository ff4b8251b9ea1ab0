"use strict";
const $ = id => document.getElementById(id);
let running = null;

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
}

async function failure(response) {
  try { return (await response.json()).error.message } catch { return "status " + response.status }
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
  const response = await fetch(model.chat ? "v1/chat/completions" : "v1/completions",
    { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await failure(response));
  let said = "";
  yield said;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) said += (model.chat ? choice.delta.content : choice.text) || "";
    yield said;
  }
}
