// What charts and panels share: elements, colours, numbers as text, downloads, marks on a canvas.
"use strict";
const AXES = { step: "Step", tokens: "Tokens", time: "Time", flops: "FLOPs" };
const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const COLOURS = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const node = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    if (name === "style" || name === "dataset")
      for (const [key, one] of Object.entries(value)) name === "style" ? made.style.setProperty(key, one) : (made.dataset[key] = one);
    else if (name.startsWith("on")) made[name] = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};

const short = (value, letters) => {
  const size = Math.abs(value);
  for (let power = letters.length; power > 0; power--) if (size >= 1000 ** power * 0.99995) return trim(value / 1000 ** power) + letters[power - 1];
  return trim(value);
};
const trim = (value) => (Math.abs(value) >= 1000 ? String(Math.round(value)) : String(+value.toPrecision(3)));
const clock = (value) => {
  if (value < 60) return `${trim(value)} s`;
  const minutes = Math.round(value / 60),
    hours = Math.floor(minutes / 60),
    days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} m` : value < 600 ? `${Math.floor(value / 60)} m ${Math.round(value % 60)} s` : `${minutes} m`;
};
const number = (value) =>
  value === 0
    ? "0"
    : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-4
      ? String(+value.toPrecision(3) === 0 ? 0 : (+value.toPrecision(3)).toExponential()).replace("e+", "e")
      : String(+value.toPrecision(4));
const FORMATS = {
  number,
  rate: (value) => short(value, "kMBT"),
  share: (value) => `${trim(100 * value)} %`,
  bytes: (value) => {
    const unit = [
      [2 ** 40, "TiB"],
      [2 ** 30, "GiB"],
      [2 ** 20, "MiB"],
      [2 ** 10, "KiB"],
    ].find(([size]) => Math.abs(value) >= size);
    return unit ? `${trim(value / unit[0])} ${unit[1]}` : `${value} B`;
  },
  seconds: (value) => (value < 1 ? `${trim(1000 * value)} ms` : clock(value)),
  step: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : trim(value)),
  tokens: (value) => short(value, "kMBT"),
  time: clock,
  flops: (value) => short(value, "kMGTPEZY"),
};

// Exponential moving average without a bias towards its start, as TensorBoard's.
function smoothed(values, weight) {
  let last = 0,
    count = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    last = last * weight + (1 - weight) * value;
    return last / (1 - weight ** ++count);
  });
}

function download(name, content) {
  const link = node("a", { download: name, href: URL.createObjectURL(content) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
const quoted = (value) =>
  value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);
const csv = (rows) => new Blob([rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n"], { type: "text/csv" });
const CSV_HEAD = ["run", "figure", "step", "tokens", "seconds", "flops", "value"];

function stroke(ctx, colour, dash, ratio, from, to) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = ratio;
  ctx.setLineDash(dash.map((one) => one * ratio));
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
  ctx.setLineDash([]);
}
function triangle(ctx, colour, x, bottom, size) {
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.moveTo(x - size, bottom);
  ctx.lineTo(x + size, bottom);
  ctx.lineTo(x, bottom - 1.6 * size);
  ctx.fill();
}
function cross(ctx, colour, x, y, size, ratio) {
  stroke(ctx, colour, [], 1.5 * ratio, [x - size, y - size], [x + size, y + size]);
  stroke(ctx, colour, [], 1.5 * ratio, [x - size, y + size], [x + size, y - size]);
}
