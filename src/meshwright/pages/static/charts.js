// A chart of several runs, drawn by uPlot: smoothing, log axes, zoom and hover in sync, CSV and PNG.
"use strict";
class Chart {
  constructor(spec, board) {
    this.spec = spec;
    this.board = board;
    this.log = null; // null: as the board says
    this.plot = null;
    this.note = node("div", { class: "chart-note" });
    this.logButton = node(
      "button",
      {
        type: "button",
        title: "Logarithmic y axis",
        onclick: () => {
          this.log = !this.isLog();
          this.draw();
        },
      },
      "log",
    );
    const tools = node(
      "div",
      { class: "tools" },
      this.logButton,
      node(
        "button",
        {
          type: "button",
          title: "Download the numbers",
          onclick: () => download(`${this.fileName()}.csv`, csv([CSV_HEAD, ...this.rows()])),
        },
        "CSV",
      ),
      node("button", { type: "button", title: "Download the picture", onclick: () => this.picture() }, "PNG"),
    );
    this.place = node("div", { class: "chart-place" });
    this.card = node(
      "section",
      { class: `card chart${spec.wide ? " wide" : ""}`, id: spec.id, "aria-label": spec.title },
      node("div", { class: "chart-head" }, node("h3", {}, spec.title), tools),
      this.note,
      this.place,
    );
    this.touch = null;
    this.listen();
  }

  isLog() {
    return this.log ?? this.board.state.logy;
  }
  fileName() {
    return this.spec.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  }

  // Every curve: of each shown run each line of which it has figures.
  lines() {
    const runs = this.board.shown(),
      several = this.board.runs.length > 1,
      found = [];
    for (const run of runs)
      this.spec.lines.forEach((line, index) => {
        const table = run.tables[line.table],
          ys = table?.[line.column],
          xs = table?.[this.board.state.x];
        if (!ys || !xs) return;
        const colour = several ? run.index : index;
        const name = several ? [run.name, this.spec.lines.length > 1 ? line.name : ""].filter(Boolean).join(", ") : line.name || this.spec.title;
        const few = table.step.length < 60 && line.table !== "step";
        found.push({
          run,
          line,
          name,
          colour: colour % COLOURS,
          dash: several ? DASHES[(index + Math.floor(run.index / COLOURS)) % DASHES.length] : [],
          xs,
          ys,
          few,
        });
      });
    return found;
  }

  rows() {
    return this.lines().flatMap(({ run, line, ys }) => {
      const table = run.tables[line.table];
      return ys.map((y, i) => [run.name, `${line.table}/${line.column}`, ...Object.keys(AXES).map((axis) => table[axis]?.[i]), y]);
    });
  }

  // What was planned for the figure: `value`, `low` and `high` of each run.
  planned() {
    const what = this.spec.planned;
    return what
      ? this.board
          .shown()
          .filter((run) => run.planned?.[what])
          .map((run) => ({ run, ...run.planned[what] }))
      : [];
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    const { x, logx, smooth } = this.board.state,
      log = this.isLog(),
      lines = (this.curves = this.lines());
    this.logButton.classList.toggle("on", log);
    this.card.hidden = !lines.length;
    if (!lines.length || this.card.closest("[hidden]")) return;
    const tables = [],
      series = [{}];
    this.places = []; // series -> line
    for (const line of lines) {
      let xs = line.xs,
        ys = line.ys;
      const keep = (i) => xs[i] !== null && xs[i] !== undefined && (!logx || xs[i] > 0);
      const at = [...xs.keys()].filter(keep);
      const clean = at.map((i) => (ys[i] === null || (log && ys[i] <= 0) ? null : ys[i]));
      xs = at.map((i) => xs[i]);
      const isSmooth = this.spec.smooth && smooth > 0 && line.line.table === "step";
      const colour = css(`--c${line.colour}`);
      const one = {
        stroke: colour,
        width: 1.75,
        dash: line.dash,
        spanGaps: true,
        points: { show: line.few, size: 5, fill: colour },
        scale: "y",
      };
      if (isSmooth) {
        tables.push([xs, clean, smoothed(clean, smooth)]);
        series.push({ ...one, stroke: `${colour}3d`, width: 1 }, one);
        this.places.push(null, line);
      } else {
        tables.push([xs, clean]);
        series.push(one);
        this.places.push(line);
      }
    }
    const data = uPlot.join(tables);
    if (!data[0].length) {
      this.card.hidden = true;
      return;
    }
    this.writeNote(lines);
    const range = this.board.state.zoom;
    this.plot = new uPlot(this.options(series, log), data, this.place);
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
  }

  options(series, log) {
    const { x, logx } = this.board.state,
      dim = css("--dim"),
      line = css("--line");
    const font = "12px system-ui, sans-serif",
      format = FORMATS[this.spec.unit];
    const axis = { stroke: dim, font, grid: { stroke: line, width: 1 }, ticks: { show: false }, gap: 8 };
    const sparse = (values) => values.filter((value) => value !== null).length > 8;
    return {
      width: Math.max(200, this.place.clientWidth || 300),
      height: this.board.height(),
      pxAlign: 0,
      legend: { show: false },
      padding: [10, 12, 0, 0],
      scales: {
        x: {
          time: false,
          distr: logx ? 3 : 1,
          range: (u, min, max) => (min === max ? [min - (logx ? min / 2 : 1), max + 1] : [min, max]),
        },
        y: { distr: log ? 3 : 1, range: (u, min, max) => this.range(min, max, log) },
      },
      axes: [
        {
          ...axis,
          size: 32,
          space: 64,
          values: (u, splits) =>
            splits.map((one) => {
              const between = (x === "step" && !Number.isInteger(one)) || (logx && sparse(splits) && !/^[125]/.test(one?.toExponential()));
              return one === null || between ? "" : FORMATS[x](one);
            }),
        },
        {
          ...axis,
          size: 62,
          space: 34,
          values: (u, splits) =>
            splits.map((one) => (one === null ? "" : log && sparse(splits) && !/^[1]/.test(one.toExponential()) ? "" : format(one))),
        },
      ],
      series,
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        dataIdx: (u, s, closest) => nearest(u.data[s], closest, u),
        points: { show: (u, s) => node("div", { class: "point", hidden: !this.places[s - 1] }) },
        bind: { dblclick: () => () => this.board.zoom(null) },
      },
      hooks: {
        draw: [(u) => this.drawMarks(u)],
        setCursor: [(u) => this.moved(u)],
        setSelect: [
          (u) => {
            if (u.select.width > 4) this.board.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            if (u.select.width) u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          },
        ],
      },
    };
  }

  // The y axis: what is visible, with room, and the plan's value if it is of the same order.
  range(min, max, log) {
    if (min === null || max === null) return log ? [0.1, 1] : [0, 1];
    for (const { value } of this.planned()) if (value > min / 3 && value < max * 3) [min, max] = [Math.min(min, value), Math.max(max, value)];
    if (log) return min === max ? [min / 2, max * 2] : [min / 1.1, max * 1.1];
    const room = (max - min || Math.abs(max) || 1) * 0.06;
    return [
      min >= 0 && (min - room < 0 || (["rate", "bytes", "seconds", "share"].includes(this.spec.unit) && min < max / 2)) ? 0 : min - room,
      max + room,
    ];
  }

  writeNote(lines) {
    const parts =
      lines.length > 1 && this.board.runs.length === 1
        ? lines.map(({ name, colour, dash }) =>
            node("span", {}, node("i", { class: `swatch${dash.length ? " dash" : ""}`, style: { "--of": `var(--c${colour})` } }), name),
          )
        : [];
    if (this.board.runs.length > 1 && this.spec.lines.length > 1)
      this.spec.lines.forEach((line, index) =>
        parts.push(node("span", {}, node("i", { class: `swatch${DASHES[index % DASHES.length].length ? " dash" : ""}` }), line.name)),
      );
    const planned = this.planned();
    if (planned.length)
      parts.push(
        node("span", { class: "planned" }, `planned ${[...new Set(planned.map(({ value }) => FORMATS[this.spec.unit](value)))].join(", ")}`),
      );
    this.note.replaceChildren(...parts);
    this.note.hidden = !parts.length;
  }

  drawMarks(u) {
    const { ctx } = u,
      { left, top, width, height } = u.bbox,
      ratio = devicePixelRatio,
      state = this.board.state;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left - 5 * ratio, top, width + 10 * ratio, height);
    ctx.clip();
    for (const { run, value, low, high } of this.planned()) {
      ctx.fillStyle = `${css(`--c${run.index % COLOURS}`)}14`;
      const [a, b] = [low, high].map((one) => u.valToPos(one, "y", true));
      if (Number.isFinite(a) && Number.isFinite(b)) ctx.fillRect(left, b, width, a - b);
      stroke(ctx, css("--dim"), [3, 4], ratio, [left, u.valToPos(value, "y", true)], [left + width, u.valToPos(value, "y", true)]);
    }
    if (state.marks)
      for (const run of this.board.shown())
        for (const event of run.events) {
          if (event[state.x] === undefined || event[state.x] === null || (state.logx && event[state.x] <= 0)) continue;
          const at = u.valToPos(event[state.x], "x", true),
            colour = css(this.board.runs.length > 1 ? `--c${run.index % COLOURS}` : "--dim");
          if (event.kind === "checkpoint")
            triangle(ctx, css(this.board.runs.length > 1 ? `--c${run.index % COLOURS}` : "--dim"), at, top + height, 4 * ratio);
          else if (event.kind === "spike" || event.kind === "problem") cross(ctx, css("--bad"), at, top + 6 * ratio, 3.5 * ratio, ratio);
          else stroke(ctx, colour, [4, 3], ratio, [at, top], [at, top + height]);
        }
    ctx.restore();
  }

  // The pointer has moved over this chart: the others follow.
  moved(u) {
    const { left, idx, top } = u.cursor;
    if (left < 0 || idx === null || idx === undefined) {
      this.board.hover(this, null);
      tip.hide();
      return;
    }
    const x = u.posToVal(left, "x"),
      box = u.over.getBoundingClientRect();
    this.board.hover(this, x);
    if (top >= 0) tip.show(this.tipOf(u, x), box.left + left, box.top + top);
  }

  tipOf(u, x) {
    const rows = [],
      seen = [];
    this.places.forEach((line, place) => {
      const at = line && u.cursor.idxs[place + 1],
        value = line && at !== null && at !== undefined ? u.data[place + 1][at] : null;
      if (value === null || value === undefined) return;
      seen.push(u.data[0][at]);
      const raw = place && this.places[place - 1] === null ? u.data[place][at] : null;
      const extra = raw === null || raw === undefined || raw === value ? "" : ` (${FORMATS[this.spec.unit](raw)})`;
      rows.push(
        node(
          "tr",
          {},
          node("td", {}, node("i", { class: "swatch", style: { "--of": `var(--c${line.colour})` } }), line.name),
          node("td", {}, FORMATS[this.spec.unit](value), node("span", { class: "more" }, extra)),
        ),
      );
    });
    const axis = this.board.state.x,
      [from, to] = [u.scales.x.min, u.scales.x.max],
      near = (to - from) * 0.012;
    const events = !this.board.state.marks
      ? []
      : this.board.shown().flatMap((run) => run.events.filter((event) => Math.abs(event[axis] - x) < near).map((event) => [run, event]));
    const told = events
      .slice(0, 4)
      .map(([run, event]) =>
        node(
          "tr",
          {},
          node("td", { class: "more", colspan: 2 }, `${this.board.runs.length > 1 ? `${run.name}, ` : ""}step ${event.step}: ${event.text}`),
        ),
      );
    const where = seen.length ? seen.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)) : x;
    return node("div", {}, node("div", { class: "more" }, `${AXES[axis]} ${FORMATS[axis](where)}`), node("table", {}, ...rows, ...told));
  }

  follow(x) {
    const u = this.plot;
    if (!u) return;
    const left = x === null || x < u.scales.x.min || x > u.scales.x.max ? -10 : u.valToPos(x, "x");
    u.setCursor({ left, top: left < 0 ? -10 : u.bbox.height / devicePixelRatio / 2 }, false);
  }

  resize() {
    this.plot?.setSize({ width: Math.max(200, this.place.clientWidth), height: this.board.height() });
  }

  // Fingers: one moves the cursor, two zoom.
  listen() {
    const places = (event) => [...event.touches].map((one) => one.clientX - this.plot.over.getBoundingClientRect().left);
    this.place.addEventListener(
      "touchstart",
      (event) => {
        if (this.plot && event.touches.length === 2 && !this.board.state.logx) this.touch = places(event).map((at) => this.plot.posToVal(at, "x"));
      },
      { passive: true },
    );
    this.place.addEventListener("touchmove", (event) => {
      const u = this.plot,
        at = u && places(event);
      if (!u) return;
      if (this.touch && at.length === 2 && Math.abs(at[1] - at[0]) > 20) {
        event.preventDefault();
        const each = (this.touch[1] - this.touch[0]) / (at[1] - at[0]),
          from = this.touch[0] - at[0] * each;
        if (each > 0) this.board.zoom([from, from + (each * u.bbox.width) / devicePixelRatio]);
      } else if (at.length === 1) {
        const box = u.over.getBoundingClientRect();
        u.setCursor({ left: at[0], top: event.touches[0].clientY - box.top });
      }
    });
    for (const kind of ["touchend", "touchcancel"])
      this.place.addEventListener(kind, () => {
        this.touch = null;
      });
  }

  picture() {
    const source = this.plot.ctx.canvas,
      ratio = devicePixelRatio,
      pad = 16 * ratio,
      head = 52 * ratio;
    const canvas = node("canvas"),
      lines = this.curves;
    canvas.width = source.width + 2 * pad;
    canvas.height = source.height + head + pad + 20 * ratio * lines.length;
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = css("--card");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.fillStyle = css("--text");
    ctx.font = `600 ${15 * ratio}px system-ui, sans-serif`;
    ctx.fillText(this.spec.title, pad, 30 * ratio);
    ctx.drawImage(source, pad, head - 8 * ratio);
    ctx.font = `${12.5 * ratio}px system-ui, sans-serif`;
    lines.forEach((line, index) => {
      const y = source.height + head + (8 + 20 * index) * ratio;
      ctx.fillStyle = css(`--c${line.colour}`);
      ctx.fillRect(pad, y - 4 * ratio, 14 * ratio, 3 * ratio);
      ctx.fillStyle = css("--text");
      ctx.fillText(line.name, pad + 22 * ratio, y);
    });
    canvas.toBlob((blob) => download(`${this.fileName()}.png`, blob), "image/png");
  }
}

// The index next to `closest` at which a series has a value, at most a twentieth of the picture away.
function nearest(values, closest, u) {
  if (closest === null || (values[closest] !== null && values[closest] !== undefined)) return closest;
  const xs = u.data[0],
    most = (u.scales.x.max - u.scales.x.min) / 20;
  for (let off = 1; off < xs.length; off++) {
    const sides = [closest - off, closest + off].filter((i) => i >= 0 && i < xs.length && Math.abs(xs[i] - xs[closest]) <= most);
    if (!sides.length) return closest;
    const hit = sides.find((i) => values[i] !== null && values[i] !== undefined);
    if (hit !== undefined) return hit;
  }
  return closest;
}
